// Timing in common: a team of threads that meets at barriers, medians, and the limits of this machine.
#pragma once

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
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

// Threads that run one body together, again and again. Bodies meet at `sync()`.
class Team {
 public:
  explicit Team(int n_threads) : n_(n_threads), barrier_(n_threads) {
    for (int i = 1; i < n_; ++i)
      threads_.emplace_back([this, i](const std::stop_token& stop) {
        for (;;) {
          barrier_.arrive_and_wait();
          if (stop.stop_requested()) return;
          (*body_)(Part{i, n_});
          barrier_.arrive_and_wait();
        }
      });
  }
  ~Team() {
    for (auto& thread : threads_) thread.request_stop();
    if (n_ > 1) barrier_.arrive_and_wait();
  }
  void run(const std::function<void(Part)>& body) {
    body_ = &body;
    if (n_ > 1) barrier_.arrive_and_wait();
    body(Part{0, n_});
    if (n_ > 1) barrier_.arrive_and_wait();
    body_ = nullptr;
  }
  // Called by every thread of a running body.
  void sync() {
    if (n_ > 1) barrier_.arrive_and_wait();
  }
  int size() const { return n_; }

 private:
  int n_;
  std::barrier<> barrier_;
  const std::function<void(Part)>* body_ = nullptr;
  std::vector<std::jthread> threads_;
};

// Memory on 2 MiB pages where the system gives them; 64-byte aligned. Its size is 0 when there is none.
class HugeBuffer {
 public:
  explicit HugeBuffer(int64_t bytes);
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

// Bytes a second that the team reads from a buffer far larger than any cache (one sample).
double read_bandwidth(Team& team, const HugeBuffer& buffer);
// f32 multiply-adds a second (one multiply and one add count as one) of the team.
double fma_peak(Team& team);
// Bytes of the last-level cache; 32 MiB if the system does not tell.
int64_t last_level_cache();

}  // namespace pagedkv::bench
