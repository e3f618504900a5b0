// A fixed set of threads that share the tasks of one loop. One thread means: run inline.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace kvb {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  int size() const { return int(workers_.size()) + 1; }
  // Calls body(task, thread) for every task; returns when all are done. Which thread gets a task is left to chance.
  void run(int num_tasks, const std::function<void(int, int)>& body);

 private:
  void work(int thread);
  void drain(int thread);
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int, int)>* body_ = nullptr;
  std::atomic<int> next_{0};
  int num_tasks_ = 0, busy_ = 0;
  uint64_t round_ = 0;
  bool stop_ = false;
};

}  // namespace kvb
