// Samples of a quiet machine: two sides in turn, each between two reads of memory, and what a slow spell touched
// goes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "bench/measure.h"

namespace pagedkv::bench {

// The read bandwidth of a team on a quiet machine: the best that this process has seen. One thread.
class ReadLimit {
 public:
  // Reads five times. `team` and `buffer` must outlive it.
  ReadLimit(Team& team, const Pages& buffer) : team_(team), buffer_(buffer) {
    for (int sample = 0; sample < 5; ++sample) read();
  }
  double read() {  // one sample, bytes a second
    const double bandwidth = read_bandwidth(team_, buffer_);
    best_ = std::max(best_, bandwidth);
    return bandwidth;
  }
  double best() const { return best_; }

 private:
  Team& team_;
  const Pages& buffer_;
  double best_ = 0;
};

struct Sample {
  double seconds = 0;
  double bandwidth = 0;  // the better of the two reads around it: a share of it is never flattered
  double slower = 0;     // the worse of the two
};

// What is left of one side's samples.
struct Kept {
  std::vector<Sample> samples;
  int64_t thrown = 0;     // slow ones that were left out
  int64_t slow_kept = 0;  // slow ones among `samples`
};

struct Side {
  int64_t wanted = 0;
  std::function<void()> run;  // null: there is no such side
};

// One thread.
class Sampling {
 public:
  explicit Sampling(ReadLimit& limit) : limit_(limit) {}

  // Runs both sides in turn until each has as many quiet samples as it wants, three times as often at most. A side
  // that has taken 15 seconds, and three samples, is not asked for more.
  std::pair<Kept, Kept> take(const Side& ours, const Side& theirs) {
    const Side* sides[2] = {&ours, &theirs};
    std::vector<Sample> samples[2];
    double taken[2] = {0, 0};
    double before = limit_.read();
    for (int64_t round = 0; round < kMostRounds * std::max(ours.wanted, theirs.wanted); ++round) {
      bool done = true;
      for (int i = 0; i < 2; ++i) {
        const bool enough = quiet(samples[i]) >= sides[i]->wanted ||
                            int64_t(samples[i].size()) >= kMostRounds * sides[i]->wanted ||
                            (taken[i] > kMostSeconds && samples[i].size() >= kFewestOfLong);
        if (!sides[i]->run || enough) continue;
        done = false;
        const double begin = now_seconds();
        sides[i]->run();
        const double seconds = now_seconds() - begin;
        const double after = limit_.read();
        taken[i] += seconds;
        samples[i].push_back({seconds, std::max(before, after), std::min(before, after)});
        before = after;
      }
      if (done) break;
    }
    return {keep(samples[0], ours.wanted), keep(samples[1], theirs.wanted)};
  }

 private:
  static constexpr double kQuiet = 0.85;  // of the best bandwidth: slower reads on either side mean a slow spell
  static constexpr int64_t kMostRounds = 3;
  static constexpr double kMostSeconds = 15;
  static constexpr size_t kFewestOfLong = 3;
  static constexpr int64_t kFewest = 7;  // samples under which slow ones have to do

  bool is_quiet(const Sample& s) const { return s.slower >= kQuiet * limit_.best(); }
  int64_t quiet(const std::vector<Sample>& samples) const {
    return std::ranges::count_if(samples, [this](const Sample& s) { return is_quiet(s); });
  }
  // The quiet ones, and the least slow after them if those are fewer than seven (or than were wanted).
  Kept keep(std::vector<Sample> samples, int64_t wanted) const {
    std::ranges::stable_sort(samples, std::greater<>(), &Sample::slower);
    const int64_t n_quiet = quiet(samples), n_all = int64_t(samples.size());
    const int64_t n = std::min(n_all, std::max(n_quiet, std::min(kFewest, wanted)));
    samples.resize(size_t(n));
    return {.samples = std::move(samples), .thrown = n_all - n, .slow_kept = n - std::min(n, n_quiet)};
  }

  ReadLimit& limit_;
};

}  // namespace pagedkv::bench
