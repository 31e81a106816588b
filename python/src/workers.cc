#include "workers.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace pagedkv::python {
namespace {

// Threads of our own. A worker looks out for its next part a little before it sleeps: layers come one after the
// other, and waking a thread can take longer than its part does.
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
      open_ = n_parts - 1;
      waiting_ = n_parts - 1;
    }
    wake_.notify_all();
    fn(0);
    std::unique_lock lock(mutex_);
    while (waiting_ > 0) take(lock);  // what no worker has begun yet
    lock.unlock();
    spin_until([this] { return open_ == 0; });
    lock.lock();
    done_.wait(lock, [this] { return open_ == 0; });
    fn_ = nullptr;
  }

 private:
  void take(std::unique_lock<std::mutex>& lock) {
    const int part = waiting_--;
    const auto* fn = fn_;
    lock.unlock();
    (*fn)(part);
    lock.lock();
    if (--open_ == 0) done_.notify_one();
  }
  void work() {
    for (;;) {
      spin_until([this] { return waiting_ > 0; });
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || waiting_ > 0; });
      if (stop_) return;
      take(lock);
    }
  }
  template <typename Condition>
  static void spin_until(Condition condition) {
    constexpr auto kPatience = std::chrono::microseconds(50);
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int)>* fn_ = nullptr;
  // Written under the mutex; a spinning thread looks without it.
  std::atomic<int> waiting_{0};  // parts that nobody has begun: 1 ... waiting_
  std::atomic<int> open_{0};     // parts that are not done, the caller's own apart
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

// The OpenMP team of a framework in this process, if one made the symbols of its runtime global, as torch does. Its
// threads spin between its own operators, so that other threads would have to share their CPUs: attention from
// torch runs on the team itself. The two functions have the same form in libgomp and in LLVM's runtime.
struct Team {
  void (*parallel)(void (*)(void*), void*, unsigned n_threads, unsigned flags);
  int (*max_threads)();

  static std::optional<Team> find() {
    const Team team{decltype(parallel)(dlsym(RTLD_DEFAULT, "GOMP_parallel")),
                    decltype(max_threads)(dlsym(RTLD_DEFAULT, "omp_get_max_threads"))};
    return team.parallel && team.max_threads ? std::optional(team) : std::nullopt;
  }
  void run(int n_parts, const std::function<void(int)>& fn) const {
    struct Job {
      const std::function<void(int)>& fn;
      const int n_parts;
      std::atomic<int> next{0};
    } job{fn, n_parts};
    const auto work = [](void* data) {
      Job& job = *static_cast<Job*>(data);
      for (int part; (part = job.next++) < job.n_parts;) job.fn(part);
    };
    // All of it, as its owner does: a team of another size would be made anew each time.
    parallel(work, &job, 0, 0);
  }
};

int cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

std::atomic<int> wanted{0};  // 0: not chosen
// Never destroyed: at the interpreter's end other threads may still compute. A fork leaves the child without the
// threads, so it starts its own when it first needs them; a team that the child has lost cannot be told from one
// that it has.
struct Shared {
  std::mutex in_use;
  std::unique_ptr<Pool> pool;
  bool forked = false;
};
Shared* shared = new Shared;

[[maybe_unused]] const int kAtFork = pthread_atfork(nullptr, nullptr, [] { shared = new Shared{.forked = true}; });

std::optional<Team> team() { return shared->forked ? std::nullopt : Team::find(); }

}  // namespace

int num_threads() {
  if (const int n = wanted.load(); n > 0) return n;
  const auto framework = team();
  return framework ? framework->max_threads() : cpus();
}

void set_num_threads(int n) { wanted = n; }

Status run_parts(int n_parts, const std::function<Status(int)>& fn) {
  std::atomic<bool> failed = false;
  Status first;
  const auto run = [&](int part) {
    if (Status status = fn(part); !status.ok() && !failed.exchange(true)) first = status;
  };
  std::unique_lock lock(shared->in_use, std::defer_lock);
  if (n_parts <= 1 || !lock.try_lock()) {
    for (int part = 0; part < n_parts; ++part) run(part);
    return first;
  }
  if (const auto framework = team(); framework && framework->max_threads() >= n_parts) {
    framework->run(n_parts, run);
    return first;
  }
  if (!shared->pool || shared->pool->n_workers() < n_parts - 1) shared->pool = std::make_unique<Pool>(n_parts - 1);
  shared->pool->run(n_parts, run);
  return first;
}

}  // namespace pagedkv::python
