// Where the thread that runs the model puts its figures up for others to read.
#pragma once

#include <mutex>

#include "engine/clock.h"
#include "engine/figures.h"
#include "pagedkv/cache.h"

namespace pagedkv::engine {

class Board {
 public:
  // --- any thread -----------------------------------------------------------------------------------------------
  SchedulerStats read() const;
  // Somebody looks at the state of each block: it is put up too for a few seconds. True: nobody did before.
  bool watch();
  bool watched() const;

  // --- the thread that runs the model ---------------------------------------------------------------------------
  bool due() const;  // the figures were put up a quarter of a second ago or longer
  // Puts these figures up, and the cache's along with them.
  void publish(SchedulerStats figures, const Cache& cache);

 private:
  Clock::time_point last_publish_{}, last_resident_{};
  mutable std::mutex mutex_;  // of all below
  SchedulerStats published_;
  Clock::time_point watched_until_{};
};

}  // namespace pagedkv::engine
