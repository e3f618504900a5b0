// A client. Closed loop: each of N connections sends a request when the answer to its last one is complete. Open loop
// (with RATE): requests come at that rate whatever happens to them, on as many connections as that takes.
//
//   load PORT NUM_CONNECTIONS SECONDS PATH BODY_FILE [RATE SLO_MS]
//
// "@A@@" and "@B@@" in the body become four digits that differ from request to request, so that no prefix repeats.
// Prints one JSON object: requests, errors, latency to the last byte, time to the first byte of the body, and for each
// chunk that carries "t" (see mock.cpp) how long it travelled; open loop also for each second how many requests were sent,
// how many answers whose first byte met SLO_MS were complete, and how many refusals came (429 with Retry-After). The
// first tenth of the time is not counted in a closed loop.

#include <sys/resource.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <sstream>
#include <vector>

#include "net.h"

using std::string;
using std::string_view;

struct Connection {
  int fd = -1;
  string request;
  size_t written = 0;
  string in;
  bool chunked = false, head_done = false, first_seen = false, good = true;
  size_t left = 0;  // of a body with a length
  bool told_when = false;  // a 429 with Retry-After
  bool busy = false;
  int64_t sent_ns = 0, first_ns = 0;
};

struct Second {
  int64_t sent = 0, good = 0, late = 0, refused = 0, bad = 0;
};

static int loop_fd, port;
static string path, body;
static uint64_t number;
static bool counting = false;
static int64_t num_requests, num_errors, num_refused, num_chunks;
static std::vector<float> latency_us, first_us, chunk_us, refused_us;
static double rate = 0, slo_ms = 0;
static int64_t begun_ns;
static std::vector<Connection*> idle;
static std::vector<Second> seconds_seen;

static Second& this_second() {
  size_t second = size_t((now_ns() - begun_ns) / 1000000000);
  if (second >= seconds_seen.size()) seconds_seen.resize(second + 1);
  return seconds_seen[second];
}

static void replace(string& text, string_view mark, uint64_t digits) {
  size_t at = text.find(mark);
  if (at == string::npos) return;
  char four[8];
  snprintf(four, sizeof four, "%04d", int(1000 + digits % 9000));
  text.replace(at, 4, four, 4);
}

static void try_write(Connection& c) {
  while (c.written < c.request.size()) {
    ssize_t n = send(c.fd, c.request.data() + c.written, c.request.size() - c.written, MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN) {
      watch(loop_fd, c.fd, EPOLLIN | EPOLLOUT, &c, EPOLL_CTL_MOD);
      return;
    }
    if (n < 0) return;  // the read that follows tells
    c.written += size_t(n);
  }
  watch(loop_fd, c.fd, EPOLLIN, &c, EPOLL_CTL_MOD);
}

static void start(Connection& c) {
  string content = body;
  uint64_t n = ++number;
  replace(content, "@A@@", n);
  replace(content, "@B@@", n / 9000);
  c.request = "POST " + path + " HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: " +
              std::to_string(content.size()) + "\r\n\r\n" + content;
  c.written = 0;
  c.head_done = c.first_seen = c.chunked = false;
  c.good = true;
  c.busy = true;
  c.sent_ns = now_ns();
  try_write(c);
}

static void open_one(Connection& c) {
  c.in.clear();
  c.fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = loopback(port);
  if (connect(c.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) die("connect");
  make_quick(c.fd);
  watch(loop_fd, c.fd, EPOLLIN, &c);
}

static void done(Connection& c) {
  float took_us = float(now_ns() - c.sent_ns) / 1e3f;
  if (counting) {
    c.good ? ++num_requests : ++num_refused;
    (c.good ? latency_us : refused_us).push_back(took_us);
  }
  c.busy = false;
  if (rate <= 0) {
    start(c);
    return;
  }
  bool in_time = double(c.first_ns - c.sent_ns) <= slo_ms * 1e6;
  Second& now = this_second();
  ++(c.good ? (in_time ? now.good : now.late) : c.told_when ? now.refused : now.bad);
  idle.push_back(&c);
}

// Chunks that carry the instant of their write.
static void look(string_view data, int64_t now) {
  for (size_t at = data.find("\"t\":"); at != string_view::npos; at = data.find("\"t\":", at + 4)) {
    if (!counting) continue;
    ++num_chunks;
    chunk_us.push_back(float(now - strtoll(data.data() + at + 4, nullptr, 10)) / 1e3f);
  }
}

// False while more is needed.
static bool parse_head(Connection& c) {
  size_t end = c.in.find("\r\n\r\n");
  if (end == string::npos) return false;
  string_view head = string_view(c.in).substr(0, end + 2);
  c.good = head.substr(9, 3) == "200";
  c.told_when = head.substr(9, 3) == "429" && !header(head, "retry-after").empty();
  c.chunked = header(head, "transfer-encoding") == "chunked";
  c.left = c.chunked ? 0 : strtoull(string(header(head, "content-length")).c_str(), nullptr, 10);
  c.in.erase(0, end + 4);
  c.head_done = true;
  return true;
}

// True when the answer is complete.
static bool parse_body(Connection& c, int64_t now) {
  if (!c.first_seen && !c.in.empty()) {
    c.first_seen = true;
    c.first_ns = now;
    if (counting && c.good) first_us.push_back(float(now - c.sent_ns) / 1e3f);
  }
  if (!c.chunked) {
    if (c.in.size() < c.left) return false;
    c.in.erase(0, c.left);
    return true;
  }
  size_t at = 0;
  bool complete = false;
  for (;;) {
    size_t line = c.in.find("\r\n", at);
    if (line == string::npos) break;
    size_t size = strtoull(c.in.data() + at, nullptr, 16);
    if (c.in.size() < line + 4 + size) break;
    look(string_view(c.in).substr(line + 2, size), now);
    at = line + 4 + size;
    if (size == 0) {
      complete = true;
      break;
    }
  }
  c.in.erase(0, at);
  return complete;
}

static void readable(Connection& c) {
  static char buffer[1 << 18];
  ssize_t n = recv(c.fd, buffer, sizeof buffer, 0);
  if (n < 0 && errno == EAGAIN) return;
  if (n <= 0) {
    close(c.fd);
    open_one(c);
    if (!c.busy) return;  // kept for too long: the server's right
    c.busy = false;
    if (counting) ++num_errors;
    if (rate > 0) {
      ++this_second().bad;
      idle.push_back(&c);
    } else {
      start(c);
    }
    return;
  }
  int64_t now = now_ns();
  c.in.append(buffer, size_t(n));
  if (!c.head_done && !parse_head(c)) return;
  if (parse_body(c, now)) done(c);
}

static void print_points(const char* name, std::vector<float>& values) {
  std::sort(values.begin(), values.end());
  auto at = [&](double q) { return values.empty() ? 0.0f : values[size_t(q * double(values.size() - 1))]; };
  printf(",\"%s\":{\"num\":%zu,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f}", name, values.size(), at(0.5),
         at(0.9), at(0.99), at(1));
}

static void print_seconds() {
  printf(",\"by_second\":[");
  for (size_t i = 0; i < seconds_seen.size(); ++i) {
    const Second& s = seconds_seen[i];
    printf("%s[%lld,%lld,%lld,%lld,%lld]", i ? "," : "", static_cast<long long>(s.sent), static_cast<long long>(s.good),
           static_cast<long long>(s.late), static_cast<long long>(s.refused), static_cast<long long>(s.bad));
  }
  printf("]");
}

int main(int argc, char** argv) {
  if (argc != 6 && argc != 8) return 2;
  port = atoi(argv[1]);
  path = argv[4];
  std::ostringstream text;
  text << std::ifstream(argv[5]).rdbuf();
  body = text.str();
  if (argc == 8) rate = atof(argv[6]), slo_ms = atof(argv[7]);
  rlimit files;  // an open loop needs a connection for each request that is not answered yet
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  loop_fd = epoll_create1(0);
  number = uint64_t(now_ns());
  std::deque<Connection> connections(size_t(atoi(argv[2])));
  double seconds = atof(argv[3]);
  for (auto& c : connections) open_one(c);
  begun_ns = now_ns();
  for (auto& c : connections) rate > 0 ? idle.push_back(&c) : start(c);
  int64_t counted_from_ns = begun_ns + (rate > 0 ? 0 : int64_t(seconds * 1e8));
  int64_t end_ns = begun_ns + int64_t(seconds * 1e9);
  double due_ns = double(begun_ns);
  std::vector<epoll_event> events(1024);
  for (int64_t now = begun_ns; now < end_ns; now = now_ns()) {
    if (!counting && now >= counted_from_ns) counting = true;
    int n = epoll_wait(loop_fd, events.data(), int(events.size()), rate > 0 ? 1 : 50);
    for (int i = 0; i < n; ++i) {
      auto& c = *static_cast<Connection*>(events[size_t(i)].data.ptr);
      if (events[size_t(i)].events & EPOLLOUT) try_write(c);
      if (events[size_t(i)].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
    }
    for (; rate > 0 && due_ns <= double(now_ns()); due_ns += 1e9 / rate) {
      if (idle.empty()) {
        connections.emplace_back();
        open_one(connections.back());
        idle.push_back(&connections.back());
      }
      Connection* c = idle.back();
      idle.pop_back();
      ++this_second().sent;
      start(*c);
    }
  }
  printf("{\"seconds\":%.4f,\"requests\":%lld,\"refused\":%lld,\"errors\":%lld,\"chunks\":%lld,\"connections\":%zu",
         double(now_ns() - counted_from_ns) / 1e9, static_cast<long long>(num_requests),
         static_cast<long long>(num_refused), static_cast<long long>(num_errors), static_cast<long long>(num_chunks),
         connections.size());
  print_points("latency_us", latency_us);
  print_points("first_us", first_us);
  print_points("chunk_us", chunk_us);
  print_points("refused_us", refused_us);
  if (rate > 0) print_seconds();
  puts("}");
}
