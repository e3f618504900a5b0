// A worker that computes nothing: it answers at once, or with one chunk each `gap_us`, as fast as one core can.
//
//   mock PORT_P INFO_P PORT_D INFO_D [MAX_OPEN]      (INFO: file with the answer to GET /internal/info)
//
// It speaks the protocols of both routers. kvbaton: one POST with the "kvbaton" object; a report ends the answer.
// vLLM: a POST with "do_remote_decode":true is a prefill and is answered with kv_transfer_params; any other POST is a
// plain completion. Tokens to send are the body's max_tokens; pace is "gap_us=N" in the body's user field (0: all at
// once). With more than MAX_OPEN streams open it says 503 like a full worker. Each chunk carries the instant of its write (CLOCK_MONOTONIC, "t"), so that a client on this machine knows how
// long it travelled. Knows nothing of tokens, prompts or correctness of requests.

#include <signal.h>

#include <algorithm>
#include <fstream>
#include <queue>
#include <sstream>
#include <unordered_map>
#include <vector>

#include "net.h"

using std::string;
using std::string_view;

struct Connection {
  int fd = -1;
  const string* info = nullptr;  // listeners keep theirs here too
  bool listens = false;
  bool broken = false;
  uint64_t number = 0;
  string in, out;
  bool waits_to_write = false;
  int64_t left = 0, gap_ns = 0, due_ns = 0;  // of the stream being sent
  bool ours = false;
};

static int loop_fd;
static int64_t max_open = 1 << 30, num_open = 0;
static std::unordered_map<uint64_t, Connection*> open_connections;
static uint64_t next_number = 1;
using Due = std::pair<int64_t, uint64_t>;
static std::priority_queue<Due, std::vector<Due>, std::greater<Due>> timers;

static const char* REPORT =
    "{\"path\":\"remote\",\"num_prompt_tokens\":64,\"num_cached_tokens\":0,\"num_remote_tokens\":64,"
    "\"num_output_tokens\":16,\"transfer_bytes\":4096}";

static void flush(Connection& c) {
  while (!c.out.empty()) {
    ssize_t n = send(c.fd, c.out.data(), c.out.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) {
      c.broken = true;
      return;
    }
    c.out.erase(0, size_t(n));
  }
  if (c.out.empty() == c.waits_to_write) {
    c.waits_to_write = !c.out.empty();
    watch(loop_fd, c.fd, EPOLLIN | (c.waits_to_write ? EPOLLOUT : 0u), &c, EPOLL_CTL_MOD);
  }
}

static void answer(Connection& c, string_view body, string_view extra = "", const char* status = "200 OK") {
  c.out += "HTTP/1.1 ";
  c.out += status;
  c.out += "\r\ncontent-type: application/json\r\ncontent-length: " + std::to_string(body.size()) +
           "\r\n";
  c.out += extra;
  c.out += "\r\n";
  c.out += body;
}

static void chunk(Connection& c, string_view data) {
  char size[32];
  snprintf(size, sizeof size, "%zx\r\n", data.size());
  c.out += size;
  c.out += data;
  c.out += "\r\n";
}

static void token(Connection& c) {
  char event[320];
  int n = snprintf(event, sizeof event,
                   "data: {\"id\":\"cmpl-0123456789abcdef01234567\",\"object\":\"text_completion\",\"created\":1,"
                   "\"model\":\"mock\",\"choices\":[{\"index\":0,\"text\":\" token\",\"logprobs\":null,"
                   "\"finish_reason\":%s}],\"t\":%lld}\n\n",
                   c.left > 1 ? "null" : "\"length\"", static_cast<long long>(now_ns()));
  chunk(c, string_view(event, size_t(n)));
  --c.left;
}

static void end_stream(Connection& c) {
  --num_open;
  if (c.ours) chunk(c, string(": kvbaton ") + REPORT + "\n\n");
  chunk(c, "data: [DONE]\n\n");
  c.out += "0\r\n\r\n";
}

static void step(Connection& c) {
  token(c);
  if (c.left > 0) {
    c.due_ns += c.gap_ns;
    timers.push({c.due_ns, c.number});
  } else {
    end_stream(c);
  }
}

static void post(Connection& c, string_view body) {
  // The fields that count are written by us, after or before a long prompt: both ends are looked at.
  string ends(body.substr(0, 600));
  if (body.size() > 600) ends += body.substr(std::max<size_t>(600, body.size() - std::min<size_t>(body.size(), 1200)));
  string_view view(ends);
  auto has = [&](string_view name, string_view value) {
    size_t at = view.find(name);
    if (at == string_view::npos) return false;
    at += name.size();
    while (at < view.size() && view[at] == ' ') ++at;
    return view.substr(at, value.size()) == value;
  };
  if (has("\"do_remote_decode\":", "true")) {
    answer(c,
           "{\"id\":\"cmpl-p\",\"object\":\"text_completion\",\"created\":1,\"model\":\"mock\",\"choices\":[{\"index\":0,"
           "\"text\":\" token\",\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":64,"
           "\"completion_tokens\":1,\"total_tokens\":65},\"kv_transfer_params\":{\"do_remote_prefill\":true,"
           "\"do_remote_decode\":false,\"remote_block_ids\":[[1,2,3,4]],\"remote_engine_id\":\"e\","
           "\"remote_request_id\":\"r\",\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,"
           "\"remote_num_tokens\":64,\"transfer_mode\":\"pull\"}}");
    return;
  }
  // kvbaton appends its object, so it is always at the end; a long prompt in it hides "kvbaton" from the window.
  c.ours = !header(c.in.substr(0, c.in.find("\r\n\r\n") + 2), "x-kvbaton-key").empty();
  c.left = number_after(view, "\"max_tokens\":", 16);
  c.gap_ns = number_after(view, "gap_us=", 0) * 1000;
  if (!has("\"stream\":", "true")) {
    c.left = 0;
    answer(c,
           "{\"id\":\"cmpl-d\",\"object\":\"text_completion\",\"created\":1,\"model\":\"mock\",\"choices\":[{\"index\":0,"
           "\"text\":\" token token token token token token token token\",\"logprobs\":null,\"finish_reason\":"
           "\"length\"}],\"usage\":{\"prompt_tokens\":64,\"completion_tokens\":16,\"total_tokens\":80}}",
           c.ours ? string("x-kvbaton-report: ") + REPORT + "\r\n" : string());
    return;
  }
  if (num_open >= max_open) {
    c.left = 0;
    answer(c, "{\"error\":{\"message\":\"full\",\"type\":\"server_error\",\"param\":null,\"code\":\"no_capacity\"}}",
           "", "503 Service Unavailable");
    return;
  }
  ++num_open;
  c.out += "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
           "transfer-encoding: chunked\r\n\r\n";
  c.due_ns = now_ns();
  if (c.gap_ns > 0) {
    step(c);
  } else {
    while (c.left > 0) token(c);
    end_stream(c);
  }
}

static void requests(Connection& c) {
  while (c.left == 0) {
    size_t head_end = c.in.find("\r\n\r\n");
    if (head_end == string::npos) return;
    string_view head = string_view(c.in).substr(0, head_end + 2);
    string_view length = header(head, "content-length");
    size_t size = length.empty() ? 0 : strtoull(string(length).c_str(), nullptr, 10);
    if (c.in.size() < head_end + 4 + size) return;
    string_view body = string_view(c.in).substr(head_end + 4, size);
    if (head.substr(0, 4) == "POST") {
      post(c, body);
    } else if (head.find("/internal/info") != string_view::npos) {
      answer(c, *c.info);
    } else {
      answer(c, "{\"object\":\"list\",\"status\":\"ok\",\"data\":[{\"id\":\"mock\",\"object\":\"model\","
                "\"created\":1,\"owned_by\":\"mock\",\"max_model_len\":200000}]}");
    }
    c.in.erase(0, head_end + 4 + size);
  }
}

static void end(Connection* c) {
  if (c->left > 0) --num_open;
  close(c->fd);
  open_connections.erase(c->number);
  delete c;
}

static Connection* listen_on(int port, const char* info_path) {
  std::ostringstream text;
  text << std::ifstream(info_path).rdbuf();
  auto* c = new Connection;
  c->info = new string(text.str());
  c->listens = true;
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  int one = 1;
  setsockopt(c->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  sockaddr_in address = loopback(port);
  if (bind(c->fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) die("bind");
  if (listen(c->fd, 4096) < 0) die("listen");
  make_quick(c->fd);
  watch(loop_fd, c->fd, EPOLLIN, c);
  return c;
}

static void accept_all(Connection& listener) {
  for (;;) {
    int fd = accept(listener.fd, nullptr, nullptr);
    if (fd < 0) return;
    make_quick(fd);
    auto* c = new Connection;
    c->fd = fd;
    c->info = listener.info;
    c->number = next_number++;
    open_connections[c->number] = c;
    watch(loop_fd, fd, EPOLLIN, c);
  }
}

static void readable(Connection& c) {
  static char buffer[1 << 18];
  for (;;) {
    ssize_t n = recv(c.fd, buffer, sizeof buffer, 0);
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      c.broken = true;
      return;
    }
    c.in.append(buffer, size_t(n));
    if (size_t(n) < sizeof buffer) break;
  }
  requests(c);
  flush(c);
}

static void play_due() {
  int64_t now = now_ns();
  while (!timers.empty() && timers.top().first <= now) {
    auto found = open_connections.find(timers.top().second);
    timers.pop();
    if (found == open_connections.end()) continue;
    Connection& c = *found->second;
    step(c);
    if (c.left == 0) requests(c);
    flush(c);
    if (c.broken) end(&c);
  }
}

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  if (argc > 5) max_open = atoll(argv[5]);
  signal(SIGPIPE, SIG_IGN);
  loop_fd = epoll_create1(0);
  listen_on(atoi(argv[1]), argv[2]);
  listen_on(atoi(argv[3]), argv[4]);
  puts("ready");
  fflush(stdout);
  std::vector<epoll_event> events(1024);
  for (;;) {
    int64_t wait_ns = timers.empty() ? 1000000000 : std::max<int64_t>(0, timers.top().first - now_ns());
    timespec wait{wait_ns / 1000000000, wait_ns % 1000000000};
    int n = epoll_pwait2(loop_fd, events.data(), int(events.size()), &wait, nullptr);
    for (int i = 0; i < n; ++i) {
      auto* c = static_cast<Connection*>(events[size_t(i)].data.ptr);
      if (c->listens) {
        accept_all(*c);
        continue;
      }
      if (events[size_t(i)].events & EPOLLOUT) flush(*c);
      if (events[size_t(i)].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(*c);
      if (c->broken) end(c);
    }
    play_due();
    if (getppid() == 1) return 0;  // whoever started us is gone
  }
}
