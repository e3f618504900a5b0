#include "threads.h"

namespace kvb {

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; i++) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::drain(int thread) {
  for (int task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;) (*body_)(task, thread);
}

void ThreadPool::run(int num_tasks, const std::function<void(int, int)>& body) {
  if (workers_.empty() || num_tasks <= 1) {
    for (int task = 0; task < num_tasks; task++) body(task, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = &body;
    num_tasks_ = num_tasks;
    next_ = 0;
    busy_ = int(workers_.size());
    round_++;
  }
  wake_.notify_all();
  drain(0);
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    lock.unlock();
    drain(thread);
    lock.lock();
    if (--busy_ == 0) done_.notify_one();
  }
}

}  // namespace kvb
