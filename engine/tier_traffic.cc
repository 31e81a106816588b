#include "engine/tier_traffic.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/sha256.h"
#include "pagedkv/log.h"

namespace pagedkv::engine {
namespace {

constexpr auto kLookupTimeOfABlock = std::chrono::microseconds(100);  // beside the patience
constexpr auto kLastWrites = std::chrono::seconds(10);                // at the end
constexpr auto kTickEvery = std::chrono::seconds(1);
constexpr auto kTryAgainAfter = std::chrono::minutes(1);  // where computing was faster
constexpr double kClearlyFaster = 0.7;                    // of the other's time, to change back
constexpr double kNewWeight = 0.3;                        // of the latest measurement
constexpr int64_t kFewestOfAPrompt = 64;  // tokens of a step that tells how fast prompts are computed
constexpr int kReaders = 2;
constexpr int64_t kBatchBytes = 4 << 20;  // read or written in one call
constexpr int64_t kPoolShare = 8;         // a part of the pool may wait to be written

PrefixKey sha256_of(const PrefixKey& a, const PrefixKey& b) {
  Sha256 hash;
  hash.add(a.bytes.data(), sizeof a.bytes);
  hash.add(b.bytes.data(), sizeof b.bytes);
  return hash.finish().value();
}

// Of one block in all groups that keep a whole context: windows are a small part of a long prompt.
int64_t block_bytes(const Cache& cache) {
  int64_t bytes = 0;
  for (int g = 0; g < std::ssize(cache.options().groups); ++g)
    if (cache.options().groups[size_t(g)].sliding_window == 0) bytes += cache.image_bytes(g).n;
  return std::max(bytes, cache.image_bytes(0).n);
}

void lower(std::atomic<int64_t>& value, int64_t to) {
  for (int64_t now = value; to < now && !value.compare_exchange_weak(now, to);) {
  }
}

void average(double& value, double latest) {
  value = value == 0 ? latest : value * (1 - kNewWeight) + latest * kNewWeight;
}

}  // namespace

// Memory for the images of one call.
struct TierTraffic::Buffer {
  std::vector<std::byte> bytes;
  std::span<std::byte> first(int64_t n) {
    if (int64_t(bytes.size()) < n) bytes.resize(size_t(n));
    return std::span(bytes).first(size_t(n));
  }
};

TierTraffic::TierTraffic(Cache& cache, TierTrafficOptions options)
    : cache_(cache),
      options_(std::move(options)),
      most_waiting_(std::max<int64_t>(16, cache.capacity().n / cache.options().block_size.n / kPoolShare)) {
  if (options_.identity) open(*options_.identity);
  threads_.emplace_back([this] { write(); });
  for (int i = 0; i < kReaders; ++i) threads_.emplace_back([this] { read(); });
}

TierTraffic::~TierTraffic() {
  collect();
  {
    std::unique_lock lock(mutex_);
    // What waits is worth knowing the model for.
    last_write_ = Clock::now() + std::max<Clock::duration>(kLastWrites, options_.patience);
    news_.wait_until(lock, last_write_, [this] { return open_ || waiting_.empty(); });
    stop_ = true;
    stop_writing_ = stop_reading_ = true;
    for (const auto& restore : abandoned_) restore->stopped_at = 0;
  }
  to_write_.notify_all();
  to_read_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  if (const int64_t n = std::ssize(waiting_); n > 0)
    notice("[tier] " + std::to_string(n) + " blocks were not stored: the tier was not done with them in time");
  for (const auto& restore : abandoned_) end(*restore);
  written_.insert(written_.end(), waiting_.begin(), waiting_.end());
  for (const KeyedBlock& block : written_) static_cast<void>(cache_.let_go(block));
}

// --- the thread that runs the model ----------------------------------------------------------------------------

void TierTraffic::collect() {
  std::vector<KeyedBlock> keyed = cache_.take_keyed(), done;
  {
    const std::lock_guard lock(mutex_);
    done.swap(written_);
    for (KeyedBlock& block : keyed) {
      if (!never_opens_ && std::ssize(waiting_) < most_waiting_) {
        waiting_.push_back(std::move(block));
        continue;
      }
      ++(open_ ? figures_.skipped_queue : figures_.skipped_closed);
      done.push_back(std::move(block));
    }
    figures_.waiting_blocks = std::ssize(waiting_);
  }
  if (!keyed.empty()) to_write_.notify_one();
  for (const KeyedBlock& block : done) static_cast<void>(cache_.let_go(block));
  std::erase_if(abandoned_, [this](const auto& restore) {
    if (!is_done(*restore)) return false;
    end(*restore);
    return true;
  });
}

bool TierTraffic::holds_blocks() const {
  const std::lock_guard lock(mutex_);
  return !abandoned_.empty() || !waiting_.empty() || writing_ || !written_.empty();
}

bool TierTraffic::give_way() {
  std::vector<KeyedBlock> given;
  {
    std::unique_lock lock(mutex_);
    given.assign(waiting_.begin(), waiting_.end());
    figures_.skipped_gave_way += std::ssize(waiting_);
    waiting_.clear();
    figures_.waiting_blocks = 0;
    if (given.empty()) news_.wait_for(lock, options_.patience, [this] { return !writing_; });
    given.insert(given.end(), written_.begin(), written_.end());
    written_.clear();
  }
  for (const KeyedBlock& block : given) static_cast<void>(cache_.let_go(block));
  return !given.empty();
}

std::shared_ptr<TierLookup> TierTraffic::look_up(const PrefixMatch& match, std::span<const int32_t> prompt) {
  const int64_t block = cache_.options().block_size.n;
  const int64_t n = std::min(std::ssize(match.keys), (std::ssize(prompt) - 1) / block);
  if (!open_ || n * block < options_.min_prefix.n || n * block - match.cached.n < options_.min_prefix.n)
    return nullptr;
  if (late_ != nullptr && late_->found < 0) {
    const std::lock_guard lock(mutex_);
    ++figures_.not_late;
    return nullptr;
  }
  auto lookup = std::make_shared<TierLookup>();
  lookup->keys.assign(match.keys.begin(), match.keys.begin() + n);
  lookup->until = Clock::now() + options_.patience + n * kLookupTimeOfABlock;
  int group = 0;  // one that keeps all of a context, if there is one
  for (int g = 0; g < std::ssize(cache_.options().groups); ++g)
    if (cache_.options().groups[size_t(g)].sliding_window == 0) group = g;
  const std::lock_guard lock(mutex_);
  ++figures_.lookups;
  read_tasks_.push_front([this, lookup, group](Buffer&) {
    for (PrefixKey& key : lookup->keys) key = stored_key(key);
    lookup->found = options_.tier->leading(lookup->keys, uint32_t(group), lookup->until);
    tell();
  });
  to_read_.notify_one();
  return lookup;
}

bool TierTraffic::is_awaited(const std::shared_ptr<TierLookup>& lookup) {
  if (lookup == nullptr || lookup->found >= 0) return false;
  if (Clock::now() < lookup->until) return true;
  late_ = lookup;
  return false;
}

std::shared_ptr<TierRestore> TierTraffic::begin(const TierLookup& lookup, const PrefixMatch& match,
                                                std::span<const int32_t> prompt) {
  const int64_t block = cache_.options().block_size.n, found = lookup.found, gain = found * block - match.cached.n;
  const auto refused = [this](int64_t& count) {
    const std::lock_guard lock(mutex_);
    ++count;
    return nullptr;
  };
  if (found < 0) return refused(figures_.not_late);
  if (gain <= 0) return nullptr;
  if (gain < options_.min_prefix.n) return refused(figures_.not_short);
  if (!is_faster(gain / block * block_bytes(cache_), gain)) return refused(figures_.not_faster);
  auto begun = cache_.begin_restore(prompt, match, Blocks(found));
  if (!begun.ok()) return refused(figures_.not_room);

  auto restore = std::make_shared<TierRestore>();
  restore->restore = std::move(*begun);
  restore->prompt.assign(prompt.begin(), prompt.end());
  restore->match = match;
  restore->keys = lookup.keys;
  restore->root = stored_key(cache_.root(match.name_space));
  restore->filled.resize(restore->restore.places.size());
  restore->stopped_at = found;
  restore->began = Clock::now();
  restore->last_read = restore->began.time_since_epoch().count();
  restore->readers = kReaders;
  const std::lock_guard lock(mutex_);
  ++figures_.restores;
  for (int i = 0; i < kReaders; ++i)
    read_tasks_.emplace_back([this, restore](Buffer& buffer) { help(*restore, buffer); });
  to_read_.notify_all();
  return restore;
}

Tokens TierTraffic::end(TierRestore& restore) {
  int64_t bytes = 0;
  std::vector<bool> filled(restore.filled.size());
  for (size_t i = 0; i < filled.size(); ++i) {
    filled[i] = restore.filled[i] != 0;
    if (filled[i]) bytes += cache_.image_bytes(restore.restore.places[i].group).n;
  }
  const Tokens cached = cache_.end_restore(std::move(restore.restore), restore.prompt, restore.match, filled);
  if (bytes == 0) return cached;
  const double took = seconds(Clock::duration(restore.last_read) - restore.began.time_since_epoch());
  average(read_bytes_s_, double(bytes) / std::max(took, 1e-6));
  options_.tier->touch(restore.keys[size_t(std::max<int64_t>(cached.n / cache_.options().block_size.n, 1) - 1)]);
  const std::lock_guard lock(mutex_);
  figures_.restored_tokens += std::max<int64_t>(0, cached.n - restore.match.cached.n);
  figures_.restored_bytes += bytes;
  figures_.restore_seconds += took;
  return cached;
}

bool TierTraffic::is_stuck(const TierRestore& restore) const {
  return Clock::now().time_since_epoch() - Clock::duration(restore.last_read) > options_.patience;
}

void TierTraffic::abandon(std::shared_ptr<TierRestore> restore) {
  restore->stopped_at = 0;
  if (!is_done(*restore) && is_stuck(*restore)) {
    if (!told_stuck_)
      notice("[tier] reads hang: a prompt is computed instead, and so are others as long as they do");
    told_stuck_ = true;
    const std::lock_guard lock(mutex_);
    ++figures_.not_late;
  }
  abandoned_.push_back(std::move(restore));
}

void TierTraffic::wait(std::chrono::milliseconds at_most) {
  std::unique_lock lock(mutex_);
  news_.wait_for(lock, at_most, [this] { return n_news_ != n_seen_; });
  n_seen_ = n_news_;
}

void TierTraffic::computed(int64_t n_tokens, double took) {
  if (n_tokens >= kFewestOfAPrompt && took > 0) average(compute_tokens_s_, double(n_tokens) / took);
}

// By what both took lately. What has not been measured is tried.
bool TierTraffic::is_faster(int64_t bytes, int64_t tokens) {
  if (compute_tokens_s_ == 0 || read_bytes_s_ == 0) return true;
  const double reading = double(bytes) / read_bytes_s_, computing = double(tokens) / compute_tokens_s_;
  if (reading_is_faster_) {
    reading_is_faster_ = reading < computing;
    try_again_ = Clock::now() + kTryAgainAfter;
  } else if (reading < kClearlyFaster * computing || Clock::now() > try_again_) {
    reading_is_faster_ = true;
  }
  return reading_is_faster_;
}

TierFigures TierTraffic::figures() const {
  const std::lock_guard lock(mutex_);
  TierFigures figures = figures_;
  figures.open = open_;
  return figures;
}

// The tier may be at work for long: nobody but the threads that work with it asks it.
void TierTraffic::refresh_figures() {
  const TierStats now = options_.tier->stats();
  const std::lock_guard lock(mutex_);
  figures_.tier = now;
}

void TierTraffic::tell() {
  const std::lock_guard lock(mutex_);
  ++n_news_;
  news_.notify_all();
}

PrefixKey TierTraffic::stored_key(const PrefixKey& key) const { return sha256_of(identity_, key); }

// --- writing ---------------------------------------------------------------------------------------------------

void TierTraffic::open(const PrefixKey& identity) {
  identity_ = identity;
  descriptor_ = sha256_of(identity_, {.bytes = cache_.descriptor()});
  open_ = true;
}

void TierTraffic::write() {
  if (!open_) {
    const auto identity = options_.identify(stop_);
    if (identity.ok()) {
      open(*identity);
      tell();
    } else {
      notice("[tier] nothing is stored or read back, since the model cannot be told from others: " +
             identity.status().message());
      const std::lock_guard lock(mutex_);
      never_opens_ = true;
      figures_.skipped_closed += std::ssize(waiting_);
      written_.insert(written_.end(), waiting_.begin(), waiting_.end());
      waiting_.clear();
      news_.notify_all();
    }
  }
  refresh_figures();
  Buffer buffer;
  auto next_tick = Clock::now() + kTickEvery;
  std::unique_lock lock(mutex_);
  for (;;) {
    to_write_.wait_until(lock, next_tick, [this] { return stop_writing_ || !waiting_.empty(); });
    if (Clock::now() >= next_tick || stop_writing_) {
      lock.unlock();
      options_.tier->tick();
      refresh_figures();
      lock.lock();
      next_tick = Clock::now() + kTickEvery;
    }
    if (stop_writing_ && (waiting_.empty() || Clock::now() > last_write_)) return;
    std::vector<KeyedBlock> batch;
    for (int64_t bytes = 0; !waiting_.empty() && bytes < kBatchBytes;) {
      bytes += cache_.image_bytes(waiting_.front().group).n;
      batch.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    if (batch.empty()) continue;
    figures_.waiting_blocks = std::ssize(waiting_);
    writing_ = true;
    lock.unlock();
    write_some(batch, buffer);
    refresh_figures();
    lock.lock();
    writing_ = false;
    for (KeyedBlock& block : batch) written_.push_back(std::move(block));
    news_.notify_all();
  }
}

void TierTraffic::write_some(std::vector<KeyedBlock>& batch, Buffer& buffer) {
  int64_t bytes = 0;
  for (const KeyedBlock& block : batch) bytes += cache_.image_bytes(block.group).n;
  std::span<std::byte> images = buffer.first(bytes);
  std::vector<TierPut> puts;
  for (const KeyedBlock& block : batch) {
    const auto image = images.first(size_t(cache_.image_bytes(block.group).n));
    images = images.subspan(image.size());
    cache_.read_image(block.group, block.block, image);
    puts.push_back({.block = {.key = stored_key(block.key),
                              .parent = stored_key(block.parent),
                              .descriptor = descriptor_,
                              .group = uint32_t(block.group),
                              .depth = block.depth,
                              .tokens = block.tokens},
                    .image = image,
                    .keep = options_.keep});
  }
  options_.tier->put(puts, Clock::now() + options_.patience);
}

// --- reading ---------------------------------------------------------------------------------------------------

void TierTraffic::read() {
  Buffer buffer;
  std::unique_lock lock(mutex_);
  for (;;) {
    to_read_.wait(lock, [this] { return stop_reading_ || !read_tasks_.empty(); });
    if (read_tasks_.empty()) return;
    const auto task = std::move(read_tasks_.front());
    read_tasks_.pop_front();
    lock.unlock();
    task(buffer);
    lock.lock();
  }
}

// Takes part in a restore until all of it is read, or not worth reading.
void TierTraffic::help(TierRestore& restore, Buffer& buffer) {
  const auto& places = restore.restore.places;
  const int64_t n = std::max<int64_t>(1, kBatchBytes / std::max<int64_t>(1, cache_.image_bytes(0).n));
  for (;;) {
    const size_t begin = restore.next.fetch_add(size_t(n));
    if (begin >= places.size() || places[begin].index >= restore.stopped_at) break;
    read_some(restore, begin, std::min(begin + size_t(n), places.size()), buffer);
  }
  refresh_figures();
  --restore.readers;
  tell();
}

void TierTraffic::read_some(TierRestore& restore, size_t begin, size_t end, Buffer& buffer) {
  const auto places = std::span(restore.restore.places).subspan(begin, end - begin);
  const size_t block = size_t(cache_.options().block_size.n);
  int64_t bytes = 0;
  for (const Restore::Place& place : places) bytes += cache_.image_bytes(place.group).n;
  std::span<std::byte> images = buffer.first(bytes);
  std::vector<TierGet> gets;
  for (const Restore::Place& place : places) {
    const auto i = size_t(place.index);
    const auto image = images.first(size_t(cache_.image_bytes(place.group).n));
    images = images.subspan(image.size());
    gets.push_back({.block = {.key = restore.keys[i],
                              .parent = i == 0 ? restore.root : restore.keys[i - 1],
                              .descriptor = descriptor_,
                              .group = uint32_t(place.group),
                              .depth = uint32_t(i),
                              .tokens = std::span(restore.prompt).subspan(i * block, block)},
                    .image = image});
  }
  const auto deadline = Clock::now() + options_.patience;
  for (size_t first = 0, i = 0; first < gets.size(); first = i + 1) {
    options_.tier->get(std::span(gets).subspan(first), deadline);
    for (i = first; i < gets.size() && gets[i].outcome == TierOutcome::kDone; ++i) {
      cache_.write_image(places[i].group, places[i].block, gets[i].image);
      restore.filled[begin + i] = 1;
    }
    // Without a block of full attention its chain ends there; without one of a window it may go on.
    if (i < gets.size() && cache_.options().groups[size_t(places[i].group)].sliding_window == 0) {
      lower(restore.stopped_at, places[i].index);
      break;
    }
  }
  restore.last_read = Clock::now().time_since_epoch().count();
}

}  // namespace pagedkv::engine
