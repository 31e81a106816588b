// Timing in common: a team of threads that meets at barriers, medians, memory and how fast it is read.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pagedkv/units.h"

namespace pagedkv::bench {

inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Spread {
  double median = 0, p10 = 0, p90 = 0;
};
inline Spread spread_of(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) { return samples[size_t(std::lround(share * double(samples.size() - 1)))]; };
  return {at(0.5), at(0.1), at(0.9)};
}

// A barrier that waits without sleeping, as engines do between operations: waking a thread takes longer than the
// small cases themselves. After a while it gives the core away.
class SpinBarrier {
 public:
  explicit SpinBarrier(int n) : n_(n) {}
  void wait() {
    const int64_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins)
      if (spins > kSpins) std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 20'000;
  const int n_;
  std::atomic<int> arrived_{0};
  std::atomic<int64_t> round_{0};
};

// Threads that run one body together, again and again. Bodies meet at `sync()`. Between runs the others sleep.
class Team {
 public:
  explicit Team(int n_threads) : n_(n_threads), start_(n_threads), barrier_(n_threads) {
    for (int i = 1; i < n_; ++i)
      threads_.emplace_back([this, i](const std::stop_token& stop) {
        for (;;) {
          start_.arrive_and_wait();
          if (stop.stop_requested()) return;
          (*body_)(Part{i, n_});
          barrier_.wait();
        }
      });
  }
  ~Team() {
    for (auto& thread : threads_) thread.request_stop();
    if (n_ > 1) start_.arrive_and_wait();
  }
  void run(const std::function<void(Part)>& body) {
    body_ = &body;
    if (n_ > 1) start_.arrive_and_wait();
    body(Part{0, n_});
    sync();
    body_ = nullptr;
  }
  // Called by every thread of a running body.
  void sync() {
    if (n_ > 1) barrier_.wait();
  }
  int size() const { return n_; }

 private:
  int n_;
  std::barrier<> start_;
  SpinBarrier barrier_;
  const std::function<void(Part)>* body_ = nullptr;
  std::vector<std::jthread> threads_;
};

enum class PageSize { k4KiB, k2MiB };

// Written memory on pages of one size, as far as the system gives them: see on_huge_pages(). Aligned to 2 MiB. Its
// size is 0 when there is none.
class Pages {
 public:
  explicit Pages(int64_t bytes, PageSize pages = PageSize::k2MiB);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
  void* mapping_ = nullptr;
  int64_t mapping_size_ = 0;
};

// The share, 0 to 1, of the mapping around `address` that is on 2 MiB pages now (AnonHugePages over Rss in
// /proc/self/smaps); none if the system does not tell.
std::optional<double> on_huge_pages(const void* address);
// Says why reads will be slower when a share of on_huge_pages() is not all; empty when it is, or is unknown.
std::string page_note(const char* what, std::optional<double> huge);

// Bytes that a sample of the read bandwidth walks: far more than any cache, at most an eighth of the memory that
// this process may use. Being killed for a measurement helps nobody.
int64_t read_buffer_bytes();
// Bytes a second that the team reads from a buffer far larger than any cache (one sample).
double read_bandwidth(Team& team, const Pages& buffer);
// Bytes of the last-level cache; 32 MiB if the system does not tell.
int64_t last_level_cache();

}  // namespace pagedkv::bench
