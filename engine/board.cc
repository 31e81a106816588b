#include "engine/board.h"

#include <utility>

namespace pagedkv::engine {
namespace {

constexpr auto kPublishEvery = std::chrono::milliseconds(250);
constexpr auto kResidentEvery = std::chrono::seconds(5);  // it asks the kernel for every page
constexpr auto kWatchedFor = std::chrono::seconds(3);

}  // namespace

SchedulerStats Board::read() const {
  const std::lock_guard lock(mutex_);
  return published_;
}

bool Board::watch() {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  const bool first = now >= watched_until_;
  watched_until_ = now + kWatchedFor;
  return first;
}

bool Board::watched() const {
  const std::lock_guard lock(mutex_);
  return Clock::now() < watched_until_;
}

bool Board::due() const { return Clock::now() - last_publish_ >= kPublishEvery; }

void Board::publish(SchedulerStats figures, const Cache& cache) {
  last_publish_ = Clock::now();
  const bool resident = last_publish_ - last_resident_ >= kResidentEvery;
  if (resident) last_resident_ = last_publish_;
  figures.cache = cache.stats(resident);
  if (watched()) figures.blocks = cache.block_views();
  const std::lock_guard lock(mutex_);
  if (!resident) figures.cache.bytes_resident = published_.cache.bytes_resident;
  published_ = std::move(figures);
}

}  // namespace pagedkv::engine
