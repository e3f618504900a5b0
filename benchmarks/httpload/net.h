// What mock and load share: non-blocking sockets, one epoll loop, the clock.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

[[noreturn]] inline void die(const char* what) {
  perror(what);
  exit(1);
}

inline sockaddr_in loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

inline void make_quick(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

inline void watch(int loop, int fd, uint32_t events, void* who, int op = EPOLL_CTL_ADD) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = who;
  if (epoll_ctl(loop, op, fd, &event) < 0) die("epoll_ctl");
}

// The number after `key` in `text`, or `missing`.
inline int64_t number_after(std::string_view text, std::string_view key, int64_t missing) {
  size_t at = text.rfind(key);
  if (at == std::string_view::npos) return missing;
  at += key.size();
  while (at < text.size() && text[at] == ' ') ++at;
  return strtoll(text.data() + at, nullptr, 10);
}

// A header's value in a head of lower or mixed case; empty when absent.
inline std::string_view header(std::string_view head, std::string_view name) {
  for (size_t at = head.find("\r\n"); at != std::string_view::npos; at = head.find("\r\n", at + 2)) {
    std::string_view line = head.substr(at + 2);
    if (line.size() > name.size() && line[name.size()] == ':' &&
        strncasecmp(line.data(), name.data(), name.size()) == 0) {
      line = line.substr(name.size() + 1);
      line = line.substr(0, line.find("\r\n"));
      while (!line.empty() && line.front() == ' ') line.remove_prefix(1);
      return line;
    }
  }
  return {};
}
