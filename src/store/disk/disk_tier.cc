#include "store/disk/disk_tier.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>

#include "base/check.h"
#include "base/text.h"
#include "pagedkv/log.h"
#include "store/record.h"

namespace pagedkv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLeastBudget = int64_t{16} << 20;
constexpr int64_t kRowBytes = 400;                   // of the index, with its four trees
constexpr int64_t kBesideChunks = int64_t{6} << 20;  // log of the index, reserve, an empty index
constexpr size_t kMostTouches = 4096;
constexpr std::chrono::seconds kLongestRest{30};

int64_t round_up_to_page(int64_t bytes) { return (bytes + Chunks::kPage - 1) / Chunks::kPage * Chunks::kPage; }
int64_t unix_seconds() { return int64_t(std::time(nullptr)); }
bool is_over(const IndexRow& row) { return row.expires > 0 && row.expires <= unix_seconds(); }

// Memory that O_DIRECT may read into.
class PageBuffer {
 public:
  explicit PageBuffer(int64_t bytes)
      : bytes_(bytes), data_(std::aligned_alloc(size_t(Chunks::kPage), size_t(bytes))) {}
  ~PageBuffer() { std::free(data_); }
  PageBuffer(const PageBuffer&) = delete;
  PageBuffer& operator=(const PageBuffer&) = delete;
  bool is_there() const { return data_ != nullptr; }
  std::span<std::byte> span() { return {static_cast<std::byte*>(data_), size_t(bytes_)}; }

 private:
  int64_t bytes_;
  void* data_;
};

// What is in memory comes from there; the rest goes past the page cache, which a restore would only turn over.
int64_t read_slot(Files& files, const HeldSlot& slot, std::span<std::byte> bytes) {
  int64_t n = files.read_cached(slot.file, bytes, slot.offset);
  if (n >= 0) return n;
  if (slot.direct >= 0) n = files.read(slot.direct, bytes, slot.offset);
  return n >= 0 ? n : files.read(slot.file, bytes, slot.offset);
}

Status check(const DiskTierOptions& options) {
  if (options.budget.n < kLeastBudget)
    return invalid_argument(
        str("[disk] a budget of ", options.budget.n, " bytes, at least ", kLeastBudget, " are needed"));
  if (options.chunk.n < 0 || options.chunk.n > options.budget.n)
    return invalid_argument(str("[disk] files of ", options.chunk.n, " bytes in a budget of ", options.budget.n));
  return Status();
}

}  // namespace

Result<std::unique_ptr<Tier>> open_disk_tier(const DiskTierOptions& options) {
  return DiskTier::open(options, system_files());
}

Result<std::unique_ptr<Tier>> DiskTier::open(const DiskTierOptions& asked, Files& files) {
  if (Status status = check(asked); !status.ok()) return status;
  DiskTierOptions options = asked;
  if (options.chunk.n == 0)
    options.chunk = Bytes(std::clamp(options.budget.n / 32, int64_t{4} << 20, int64_t{1} << 30));
  auto directory = Directory::open(options.directory);
  if (!directory.ok()) return directory.status();
  std::unique_ptr<DiskTier> tier(new DiskTier(std::move(options), std::move(*directory), files));
  if (Status status = tier->open_all(); !status.ok()) return status;
  return std::unique_ptr<Tier>(std::move(tier));
}

// --- opening ---------------------------------------------------------------------------------------------------

Status DiskTier::open_all() {
  if (Status status = chunks_.open(); !status.ok()) return status;
  if (Status status = open_index(); !status.ok()) return status;
  if (Status status = match_index_to_chunks(); !status.ok()) return status;
  // A smaller budget than last time's.
  while (!fits(0, 0) && drop_coldest_chunk(INT64_MAX)) {
  }
  return Status();
}

// An index that is damaged, or was lost, is made again from the slots.
Status DiskTier::open_index() {
  auto index = BlockIndex::open(directory_.index_path(), true);
  if (!index.ok()) {
    Status why = index.status();
    if (why.code() != Code::kCorrupt) return why;
    notice(str(why.message(), "; ", directory_.index_path(), " is made again from the images"));
    for (const char* suffix : {"", "-wal", "-shm", "-journal"}) files_.unlink(directory_.index_path() + suffix);
    index = BlockIndex::open(directory_.index_path(), false);
    if (!index.ok()) return index.status();
  }
  index_ = std::move(*index);
  const auto empty = index_->is_empty();
  if (!empty.ok()) return empty.status();
  return *empty ? rebuild_index() : Status();
}

Status DiskTier::rebuild_index() {
  PageBuffer page(Chunks::kPage);
  if (!page.is_there()) return Status(Code::kNoMemory, "[disk] no memory for a page");
  if (Status status = index_->begin(); !status.ok()) return status;
  for (const int64_t chunk : chunks_.numbers()) {
    for (int64_t slot = 0; slot < chunks_.n_slots(chunk); ++slot) {
      const HeldSlot held = chunks_.hold({chunk, slot}, false);
      const int64_t n = files_.read(held.file, page.span(), held.offset);
      chunks_.let_go({chunk, slot});
      const auto facts = n > 0 ? decode_header(page.span()) : std::nullopt;
      if (!facts || record_bytes(facts->n_tokens, facts->image_bytes) > held.bytes) continue;
      const IndexRow row{.key = facts->key,
                         .parent = facts->parent,
                         .group = facts->group,
                         .depth = facts->depth,
                         .place = {chunk, slot},
                         .slot_bytes = held.bytes,
                         .image_bytes = facts->image_bytes,
                         .used = facts->created * 1'000'000,
                         .expires = facts->expires};
      if (Status status = index_->insert(row); !status.ok()) {
        index_->undo();
        return status;
      }
    }
  }
  return index_->end();
}

// What the index names and the chunks lack is erased; the rest is counted.
Status DiskTier::match_index_to_chunks() {
  std::vector<int64_t> wrong;
  Status status = index_->each([&](const IndexRow& row) {
    const bool fits = chunks_.has(row.place) && chunks_.slot_bytes(row.place.chunk) == row.slot_bytes &&
                      row.image_bytes >= 0 && row.image_bytes <= row.slot_bytes && chunks_.take(row.place);
    if (!fits) {
      wrong.push_back(row.id);
      return;
    }
    ++stats_.blocks;
    stats_.image_bytes += row.image_bytes;
    last_stamp_ = std::max(last_stamp_, row.used);
  });
  if (!status.ok() || wrong.empty()) return status;
  status = index_->begin();
  for (const int64_t id : wrong)
    if (status.ok()) status = index_->erase(id);
  return status.ok() ? index_->end() : status;
}

// --- rest and warnings
// ---------------------------------------------------------------------------------------------

// After an error the tier rests, longer each time, so that a broken disk costs a call now and then and no more.
void DiskTier::fail(const Status& status) {
  index_is_damaged_ |= status.code() == Code::kCorrupt;
  down_until_ = Clock::now() + rest_;
  rest_ = std::min(rest_ * 2, kLongestRest);
  stats_.down = true;
  if (!told_down_)
    notice(str("[disk] ", options_.directory, " does not work and is left alone for a while: ", status.message()));
  told_down_ = true;
}

// Files that have no name any more would be written for nobody.
void DiskTier::give_up() {
  is_gone_ = stats_.down = true;
  notice(str("[disk] ", options_.directory,
             " was deleted or replaced: nothing is stored or read any more, until the next start"));
}

bool DiskTier::rests() {
  if (is_gone_ || Clock::now() < down_until_) return true;
  if (!index_is_damaged_) return false;
  if (chunks_.is_any_held()) return true;
  index_.reset();
  chunks_.give_all();
  stats_.blocks = stats_.image_bytes = 0;
  Status status = open_index();
  if (status.ok()) status = match_index_to_chunks();
  index_is_damaged_ = !status.ok();
  if (status.ok()) works();
  if (!status.ok()) fail(Status(Code::kCorrupt, status.message()));
  return !status.ok();
}

void DiskTier::works() {
  if (!stats_.down) return;
  stats_.down = false;
  told_down_ = false;
  rest_ = std::chrono::seconds(1);
  notice(str("[disk] ", options_.directory, " works again"));
}

int64_t DiskTier::now_stamp() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return last_stamp_ = std::max(last_stamp_ + 1, int64_t(now.tv_sec) * 1'000'000 + now.tv_nsec / 1000);
}

// Changes the index, all or nothing. On a full disk the reserve makes room once.
bool DiskTier::change(const std::function<Status()>& changes) {
  for (const bool last_try : {false, true}) {
    Status status = index_->begin();
    if (status.ok()) status = changes();
    if (status.ok()) status = index_->end();
    if (status.ok()) {
      if (last_try) directory_.make_reserve();
      return true;
    }
    index_->undo();
    if (last_try || status.code() != Code::kCapacity) {
      fail(status);
      return false;
    }
    directory_.give_reserve_up();
    if (Status cut = index_->checkpoint(); !cut.ok()) status = cut;  // the second try tells
  }
  return false;
}

// --- room ------------------------------------------------------------------------------------------------------

bool DiskTier::fits(int64_t more_bytes, int64_t more_slots) const {
  return chunks_.bytes() + more_bytes + kBesideChunks + (chunks_.slots() + more_slots) * kRowBytes <=
         options_.budget.n;
}

bool DiskTier::grow(int64_t slot_bytes) {
  const int64_t n_slots = std::max<int64_t>(1, options_.chunk.n / slot_bytes);
  if (!fits(n_slots * slot_bytes, n_slots)) return false;
  const Status status = chunks_.add(slot_bytes, options_.chunk.n);
  if (status.ok()) return true;
  if (!told_full_) notice(str(status.message(), "; older blocks make room from now on"));
  told_full_ = true;
  return false;
}

// The chunk whose blocks have all been unused since `before`.
bool DiskTier::drop_coldest_chunk(int64_t before) {
  const auto used = index_->chunks_by_use();
  if (!used.ok()) return false;
  std::vector<BlockIndex::ChunkUse> order;
  for (const int64_t number : chunks_.numbers())
    if (std::ranges::none_of(*used, [&](const auto& use) { return use.chunk == number; }))
      order.push_back({number, -1, 0, 0});
  order.insert(order.end(), used->begin(), used->end());
  for (const auto& use : order) {
    if (use.used >= before) return false;
    if (chunks_.is_held(use.chunk)) continue;
    if (!change([&] { return index_->erase_chunk(use.chunk); })) return false;
    chunks_.drop(use.chunk);
    stats_.image_bytes -= use.image_bytes;
    stats_.blocks -= use.blocks;
    stats_.evicted += use.blocks;
    return true;
  }
  return false;
}

bool DiskTier::evict_one(int64_t slot_bytes) {
  const auto row = index_->coldest(slot_bytes);
  if (!row.ok() || !*row) return false;
  if (!change([&] { return index_->erase((*row)->id); })) return false;
  chunks_.give((*row)->place);
  --stats_.blocks;
  stats_.image_bytes -= (*row)->image_bytes;
  ++stats_.evicted;
  return true;
}

std::optional<SlotPlace> DiskTier::room_for(int64_t slot_bytes, Lock& lock) {
  PKV_CHECK(lock.owns_lock());
  for (int tries = 0; tries < 64; ++tries) {
    if (const auto place = chunks_.find_free(slot_bytes)) return place;
    if (grow(slot_bytes)) continue;
    flush_touches();
    const auto own = index_->coldest(slot_bytes);
    if (!own.ok()) return std::nullopt;
    // Another size's chunk goes when all of it is colder than what this size would lose.
    if (chunks_.has_other_size(slot_bytes) && (!*own || Clock::now() >= look_for_chunks_)) {
      if (drop_coldest_chunk(*own ? (*own)->used : INT64_MAX)) continue;
      look_for_chunks_ = Clock::now() + std::chrono::seconds(1);
    }
    if (!*own || !evict_one(slot_bytes)) return std::nullopt;
  }
  return std::nullopt;
}

void DiskTier::flush_touches() {
  std::vector<PrefixKey> touched;
  touched.swap(touched_);
  if (touched.empty()) return;
  const int64_t now = now_stamp();
  change([&] {
    Status status;
    for (const PrefixKey& key : touched)
      if (status.ok()) status = index_->touch_chain(key, now);
    return status;
  });
}

// The index forgets the block, and its slot says no more what it holds.
void DiskTier::forget(const IndexRow& row, Lock& lock) {
  if (!change([&] { return index_->erase(row.id); })) return;
  --stats_.blocks;
  stats_.image_bytes -= row.image_bytes;
  const HeldSlot slot = chunks_.hold(row.place, true);
  chunks_.give(row.place);
  lock.unlock();
  const std::vector<std::byte> zeros(static_cast<size_t>(Chunks::kPage));
  files_.write(slot.file, zeros, slot.offset);
  lock.lock();
  chunks_.let_go(row.place);
}

// --- the face --------------------------------------------------------------------------------------------------

DiskTier::~DiskTier() {
  if (!is_ours()) static_cast<void>(index_.release());  // closing it would write into the parent's
}

TierTraits DiskTier::traits() const {
  return {.name = "disk", .medium = "DISK", .max_image = options_.chunk, .shared = false, .durable = true};
}

int64_t DiskTier::leading(std::span<const PrefixKey> keys, uint32_t group, Deadline deadline) {
  if (!is_ours()) return 0;
  const Lock lock(mutex_);
  if (rests()) return 0;
  int64_t n = 0;
  for (const PrefixKey& key : keys) {
    if (n % 64 == 0 && Clock::now() > deadline) return 0;
    const auto row = index_->find(key, group);
    if (!row.ok()) {
      fail(row.status());
      return 0;
    }
    if (!*row || is_over(**row)) break;
    ++n;
  }
  return n;
}

TierOutcome DiskTier::read_verified(const HeldSlot& slot, TierGet& item) {
  const int64_t bytes = record_bytes(std::ssize(item.block.tokens), std::ssize(item.image));
  if (bytes > slot.bytes) return TierOutcome::kRefused;
  PageBuffer buffer(round_up_to_page(bytes));
  if (!buffer.is_there()) return TierOutcome::kNoRoom;
  const int64_t n = read_slot(files_, slot, buffer.span());
  if (n < 0)
    return n == -EIO && files_.length(slot.file) < slot.offset + bytes ? TierOutcome::kRefused : TierOutcome::kDown;
  if (!is_record_of(buffer.span(), item.block, std::ssize(item.image))) return TierOutcome::kRefused;
  const auto image = buffer.span().subspan(size_t(bytes) - item.image.size(), item.image.size());
  std::memcpy(item.image.data(), image.data(), image.size());
  return TierOutcome::kDone;
}

TierOutcome DiskTier::get_one(TierGet& item) {
  Lock lock(mutex_);
  if (rests()) return TierOutcome::kDown;
  const auto row = index_->find(item.block.key, item.block.group);
  if (!row.ok()) {
    fail(row.status());
    return TierOutcome::kDown;
  }
  if (!*row || is_over(**row)) return TierOutcome::kMissing;
  const HeldSlot slot = chunks_.hold((*row)->place, false);
  lock.unlock();
  const TierOutcome outcome = read_verified(slot, item);
  lock.lock();
  chunks_.let_go(slot.place);
  if (outcome == TierOutcome::kDone) {
    stats_.bytes_read += slot.bytes;
    works();
  } else if (outcome == TierOutcome::kDown) {
    fail(Status(Code::kUnavailable, str("chunk ", slot.place.chunk, " cannot be read")));
  } else if (outcome == TierOutcome::kRefused) {
    // It may have made room meanwhile, and another block lie there.
    const auto now = index_->find(item.block.key, item.block.group);
    if (!now.ok() || !*now || (*now)->id != (*row)->id || (*now)->place != (*row)->place)
      return TierOutcome::kMissing;
    if (!told_refused_)
      notice(
          str("[disk] ", options_.directory, ": a block is not what was stored; it is deleted and computed again"));
    told_refused_ = true;
    forget(**now, lock);
  }
  return outcome;
}

void DiskTier::get(std::span<TierGet> items, Deadline deadline) {
  if (!is_ours()) {
    for (TierGet& item : items) item.outcome = TierOutcome::kDown;
    return;
  }
  const auto begin = Clock::now();
  int64_t counts[kTierOutcomes] = {};
  bool ended = false;
  for (TierGet& item : items) {
    if (ended)
      item.outcome = TierOutcome::kMissing;
    else
      item.outcome = Clock::now() > deadline ? TierOutcome::kLate : get_one(item);
    if (!ended) ++counts[int(item.outcome)];
    ended |= item.outcome != TierOutcome::kDone;
  }
  const Lock lock(mutex_);
  for (int i = 0; i < kTierOutcomes; ++i) stats_.gets[i] += counts[i];
  stats_.get_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
}

TierOutcome DiskTier::write_record(const HeldSlot& slot, const TierPut& item, int64_t expires) {
  PageBuffer buffer(slot.bytes);
  if (!buffer.is_there()) return TierOutcome::kNoRoom;
  const RecordHeader header = encode_header(item.block, item.image, unix_seconds(), expires);
  const auto tokens = std::as_bytes(item.block.tokens);
  std::byte* to = buffer.span().data();
  to = std::copy(header.begin(), header.end(), to);
  to = std::copy(tokens.begin(), tokens.end(), to);
  to = std::copy(item.image.begin(), item.image.end(), to);
  std::fill(to, buffer.span().data() + slot.bytes, std::byte{0});
  if (files_.write(slot.file, buffer.span(), slot.offset) < 0) return TierOutcome::kDown;
  if (options_.sync == DiskTierOptions::Sync::kEach && files_.sync(slot.file) < 0) return TierOutcome::kDown;
  return TierOutcome::kDone;
}

Result<bool> DiskTier::has_parent(const TierBlock& block) {
  if (block.depth == 0) return true;
  const auto rows = index_->rows_of(block.parent);
  if (!rows.ok()) return rows.status();
  return !rows->empty();
}

TierOutcome DiskTier::put_one(const TierPut& item, Lock& lock) {
  if (rests()) return TierOutcome::kDown;
  const auto known = index_->find(item.block.key, item.block.group);
  if (!known.ok()) {
    fail(known.status());
    return TierOutcome::kDown;
  }
  const int64_t bytes = record_bytes(std::ssize(item.block.tokens), std::ssize(item.image));
  const int64_t slot_bytes = round_up_to_page(bytes);
  if (*known && (*known)->slot_bytes == slot_bytes && !is_over(**known)) return TierOutcome::kDone;
  if (*known) forget(**known, lock);
  if (slot_bytes > options_.chunk.n) return TierOutcome::kNoRoom;
  const auto is_usable = has_parent(item.block);
  if (!is_usable.ok()) fail(is_usable.status());
  if (!is_usable.ok() || !*is_usable) return is_usable.ok() ? TierOutcome::kOrphan : TierOutcome::kDown;
  const auto place = room_for(slot_bytes, lock);
  if (!place) return rests() ? TierOutcome::kDown : TierOutcome::kNoRoom;
  const int64_t expires = item.keep.count() > 0 ? unix_seconds() + item.keep.count() : 0;
  const HeldSlot slot = chunks_.hold(*place, true);
  lock.unlock();
  const TierOutcome written = write_record(slot, item, expires);
  lock.lock();
  chunks_.let_go(*place);
  if (written == TierOutcome::kDown)
    fail(Status(Code::kUnavailable, str("chunk ", place->chunk, " cannot be written")));
  if (written != TierOutcome::kDone) return written;
  stats_.bytes_written += slot_bytes;
  const auto again = index_->find(item.block.key, item.block.group);
  if (again.ok() && *again) return TierOutcome::kDone;  // somebody else has put it meanwhile
  PKV_CHECK(chunks_.take(*place));
  const IndexRow row{.key = item.block.key,
                     .parent = item.block.parent,
                     .group = item.block.group,
                     .depth = item.block.depth,
                     .place = *place,
                     .slot_bytes = slot_bytes,
                     .image_bytes = std::ssize(item.image),
                     .used = now_stamp(),
                     .expires = expires};
  if (!change([&] { return index_->insert(row); })) {
    chunks_.give(*place);
    return TierOutcome::kDown;
  }
  ++stats_.blocks;
  stats_.image_bytes += row.image_bytes;
  works();
  return TierOutcome::kDone;
}

void DiskTier::put(std::span<TierPut> items, Deadline deadline) {
  if (!is_ours()) {
    for (TierPut& item : items) item.outcome = TierOutcome::kDown;
    return;
  }
  const auto begin = Clock::now();
  Lock lock(mutex_);
  // What comes before a block must not be what makes room for it.
  if (!items.empty()) touched_.push_back(items.front().block.parent);
  for (TierPut& item : items) {
    item.outcome = Clock::now() > deadline ? TierOutcome::kLate : put_one(item, lock);
    ++stats_.puts[int(item.outcome)];
  }
  if (!items.empty()) touched_.push_back(items.back().block.key);
  if (touched_.size() > kMostTouches) flush_touches();
  stats_.put_seconds += std::chrono::duration<double>(Clock::now() - begin).count();
}

void DiskTier::touch(const PrefixKey& last) {
  if (!is_ours()) return;
  const Lock lock(mutex_);
  if (touched_.size() < kMostTouches) touched_.push_back(last);
}

bool DiskTier::remove(std::span<const PrefixKey> keys, Deadline deadline) {
  if (!is_ours()) return false;
  Lock lock(mutex_);
  for (const PrefixKey& key : keys) {
    if (rests() || Clock::now() > deadline) return false;
    const auto rows = index_->rows_of(key);
    if (!rows.ok()) {
      fail(rows.status());
      return false;
    }
    for (const IndexRow& row : *rows) forget(row, lock);
  }
  return !stats_.down;
}

void DiskTier::tick() {
  if (!is_ours()) return;
  Lock lock(mutex_);
  if (rests()) return;
  if (!directory_.is_there()) return give_up();
  flush_touches();
  const auto old = index_->expired(unix_seconds(), 1024);
  if (old.ok())
    for (const IndexRow& row : *old) {
      forget(row, lock);
      ++stats_.expired;
    }
  if (options_.sync != DiskTierOptions::Sync::kNever) {
    const auto written = chunks_.hold_written();
    lock.unlock();
    int error = 0;
    for (const HeldSlot& slot : written) error = std::min(error, files_.sync(slot.file));
    lock.lock();
    for (const HeldSlot& slot : written) chunks_.let_go(slot.place);
    if (error < 0) fail(Status(Code::kUnavailable, str("sync: ", std::strerror(-error))));
    if (!written.empty())
      if (Status status = index_->checkpoint(); !status.ok()) fail(status);
  }
}

TierStats DiskTier::stats() const {
  if (!is_ours()) return {.budget = options_.budget.n, .down = true};
  const Lock lock(mutex_);
  TierStats out = stats_;
  out.bytes = directory_.bytes();
  out.budget = options_.budget.n;
  return out;
}

}  // namespace pagedkv
