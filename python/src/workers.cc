#include "workers.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pagedkv::python {
namespace {

class Pool {
 public:
  explicit Pool(int n_workers) {
    for (int i = 0; i < n_workers; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      const std::scoped_lock lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int n_workers() const { return int(threads_.size()); }

  // One caller at a time.
  void run(int n_parts, const std::function<void(int)>& fn) {
    {
      const std::scoped_lock lock(mutex_);
      fn_ = &fn;
      next_ = 1;
      n_parts_ = n_parts;
      open_ = n_parts - 1;
    }
    wake_.notify_all();
    fn(0);
    std::unique_lock lock(mutex_);
    while (next_ < n_parts_) take(lock);  // what no worker has begun yet
    done_.wait(lock, [this] { return open_ == 0; });
    fn_ = nullptr;
  }

 private:
  void take(std::unique_lock<std::mutex>& lock) {
    const int part = next_++;
    const auto* fn = fn_;
    lock.unlock();
    (*fn)(part);
    lock.lock();
    if (--open_ == 0) done_.notify_one();
  }
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || next_ < n_parts_; });
      if (stop_) return;
      take(lock);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int)>* fn_ = nullptr;
  int next_ = 0, n_parts_ = 0, open_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

int cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

std::atomic<int> wanted{0};  // 0: not chosen yet
// Never destroyed: at the interpreter's end other threads may still compute. A fork leaves the child without the
// threads, so it starts its own when it first needs them.
struct Shared {
  std::mutex in_use;
  std::unique_ptr<Pool> pool;
};
Shared* shared = new Shared;

[[maybe_unused]] const int kAtFork = pthread_atfork(nullptr, nullptr, [] { shared = new Shared; });

}  // namespace

int num_threads() {
  const int n = wanted.load();
  return n > 0 ? n : cpus();
}

void set_num_threads(int n) { wanted = n; }

void run_parts(int n_parts, const std::function<void(int)>& fn) {
  std::unique_lock lock(shared->in_use, std::defer_lock);
  if (n_parts > 1 && lock.try_lock()) {
    if (!shared->pool || shared->pool->n_workers() < n_parts - 1)
      shared->pool = std::make_unique<Pool>(n_parts - 1);
    shared->pool->run(n_parts, fn);
    return;
  }
  for (int part = 0; part < n_parts; ++part) fn(part);
}

}  // namespace pagedkv::python
