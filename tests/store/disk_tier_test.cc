// The disk tier's own promises: it survives what disks and processes do, and its folder never outgrows its budget.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <csignal>
#include <fstream>
#include <set>
#include <thread>

#include "pagedkv/log.h"
#include "store/disk/disk_tier.h"
#include "tests/store/tier_world.h"

namespace pagedkv {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMiB = int64_t{1} << 20;

int64_t bytes_on_disk(const std::string& path) {
  int64_t total = 0;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    struct stat facts {};
    if (lstat(entry.path().c_str(), &facts) == 0) total += facts.st_blocks * 512;
  }
  return total;
}

std::vector<std::string> files_of(const std::string& path) {
  std::vector<std::string> out;
  for (const auto& entry : fs::recursive_directory_iterator(path))
    if (entry.is_regular_file()) out.push_back(entry.path());
  std::ranges::sort(out);
  return out;
}

void flip(const std::string& path, int64_t offset, uint8_t bits) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(offset);
  const int byte = file.get();
  file.clear();
  file.seekp(offset);
  file.put(char(byte ^ bits));
}

// How many of these chains' blocks come back. Wrong bytes fail the test.
int64_t served(Tier& tier, uint32_t chains, uint32_t depth, int64_t image_bytes) {
  int64_t n = 0;
  for (uint32_t c = 0; c < chains; ++c)
    for (uint32_t d = 0; d < depth; ++d) n += get(tier, Sample(c, d, image_bytes)) == TierOutcome::kDone;
  return n;
}

void fill(Tier& tier, uint32_t chains, uint32_t depth, int64_t image_bytes) {
  for (uint32_t c = 0; c < chains; ++c)
    for (uint32_t d = 0; d < depth; ++d) EXPECT_EQ(put(tier, Sample(c, d, image_bytes)), TierOutcome::kDone);
}

TEST(DiskTier, ServesAfterARestartWhatItWasGiven) {
  const Folder folder;
  { fill(*folder.open(), 4, 10, 30000); }
  const auto tier = folder.open();
  EXPECT_EQ(tier->stats().blocks, 40);
  EXPECT_EQ(tier->stats().image_bytes, 40 * 30000);
  EXPECT_EQ(served(*tier, 4, 10, 30000), 40);
}

TEST(DiskTier, OnlyItsOwnerReadsTheFolder) {
  const Folder folder;
  const mode_t before = umask(0);
  { fill(*folder.open(), 1, 2, 30000); }
  umask(before);
  struct stat facts {};
  for (const auto& entry : fs::recursive_directory_iterator(folder.path())) {
    ASSERT_EQ(lstat(entry.path().c_str(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 0777, S_ISDIR(facts.st_mode) ? 0700 : 0600) << entry.path();
  }
  ASSERT_EQ(stat(folder.path().c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 0777, 0700);
}

TEST(DiskTier, OneProcessUsesAFolderAtATimeAndTheNextTakesItOver) {
  const Folder folder;
  auto first = folder.open();
  const auto second = open_disk_tier(folder.options());
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), Code::kUnavailable);
  EXPECT_NE(second.status().message().find(std::to_string(getpid())), std::string::npos)
      << second.status().message();
  first.reset();
  EXPECT_NE(folder.open(), nullptr);
}

TEST(DiskTier, LeavesAloneWhatIsNoneOfItsOwn) {
  const Folder folder;
  fs::create_directory(folder.path());
  std::ofstream(folder.path() + "/thesis.txt") << "mine";
  auto tier = open_disk_tier(folder.options());
  ASSERT_FALSE(tier.ok());
  EXPECT_EQ(tier.status().code(), Code::kUnsupported);
  fs::remove(folder.path() + "/thesis.txt");
  std::ofstream(folder.path() + "/format") << "pagedkv blocks 7\n";
  tier = open_disk_tier(folder.options());
  ASSERT_FALSE(tier.ok());
  EXPECT_NE(tier.status().message().find("blocks 7"), std::string::npos) << tier.status().message();
}

TEST(DiskTier, SmallBudgetsAndOddOptionsAreRefusedByName) {
  const Folder folder;
  for (const int64_t budget : {int64_t{0}, int64_t{-1}, kMiB, int64_t{INT64_MIN}})
    EXPECT_EQ(open_disk_tier(folder.options(budget)).status().code(), Code::kInvalidArgument);
  DiskTierOptions options = folder.options();
  options.chunk = Bytes(-1);
  EXPECT_EQ(open_disk_tier(options).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(open_disk_tier({.directory = ""}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(open_disk_tier({.directory = "/dev/null/x"}).status().code(), Code::kUnavailable);
}

TEST(DiskTier, ALostIndexIsMadeAgainFromTheImages) {
  const Folder folder;
  const Sample removed(0, 3, 30000);
  {
    const auto tier = folder.open();
    fill(*tier, 4, 10, 30000);
    EXPECT_TRUE(tier->remove({&removed.block.key, 1}, later()));
  }
  for (const char* name : {"/index.db", "/index.db-wal"}) fs::remove(folder.path() + name);
  const auto tier = folder.open();
  EXPECT_EQ(get(*tier, removed), TierOutcome::kMissing);  // removed is removed, whatever happens to the index
  EXPECT_EQ(served(*tier, 4, 10, 30000), 39);
}

TEST(DiskTier, FlippedBitsAnywhereAreNeverServed) {
  const char* asked = std::getenv("PAGEDKV_FLIPS");
  const int flips = asked != nullptr ? std::atoi(asked) : 60;
  std::mt19937 random(5);
  int64_t n_served = 0;
  for (int i = 0; i < flips; ++i) {
    const Folder folder;
    { fill(*folder.open(), 2, 5, 9000); }
    const auto files = files_of(folder.path());
    for (int bit = 0; bit < 8; ++bit) {
      const std::string& path = files[random() % files.size()];
      if (const auto size = int64_t(fs::file_size(path)); size > 0)
        flip(path,
             path.ends_with("db") || random() % 2 == 0 ? int64_t(random()) % size
                                                       : int64_t(random()) % std::min<int64_t>(size, 120000),
             uint8_t(1 << random() % 8));
    }
    const auto tier = open_disk_tier(folder.options());
    if (!tier.ok()) {
      EXPECT_EQ(tier.status().code(), Code::kUnsupported) << tier.status().message();  // a flip in `format`
      continue;
    }
    n_served += served(**tier, 2, 5, 9000);
    EXPECT_EQ(put(**tier, Sample(9, 0, 9000)), TierOutcome::kDone);
    EXPECT_EQ(get(**tier, Sample(9, 0, 9000)), TierOutcome::kDone);
  }
  EXPECT_GT(n_served, flips * 10 / 4);
}

TEST(DiskTier, FilesThatWereCutOffAreMissesAndTheRestServes) {
  for (int which = 0; which < 8; ++which) {
    for (const double part : {0.0, 0.01, 0.5, 0.999}) {
      const Folder folder;
      { fill(*folder.open(), 2, 5, 9000); }
      const auto files = files_of(folder.path());
      if (size_t(which) >= files.size()) continue;
      fs::resize_file(files[size_t(which)], uint64_t(double(fs::file_size(files[size_t(which)])) * part));
      const auto tier = open_disk_tier(folder.options());
      if (!tier.ok()) {
        EXPECT_TRUE(files[size_t(which)].ends_with("format")) << tier.status().message();
        continue;
      }
      served(**tier, 2, 5, 9000);
      EXPECT_EQ(put(**tier, Sample(9, 0, 9000)), TierOutcome::kDone) << files[size_t(which)] << part;
      EXPECT_EQ(get(**tier, Sample(9, 0, 9000)), TierOutcome::kDone);
    }
  }
}

TEST(DiskTier, TheFolderStaysWithinItsBudgetWhateverSizesComeMixed) {
  const Folder folder;
  const int64_t budget = 96 * kMiB;
  const auto tier = folder.open(budget);
  std::mt19937 random(3);
  const int64_t sizes[] = {195776, 49152, 99999};
  int64_t written = 0;
  for (uint32_t i = 0; written < 10 * budget; ++i) {
    // Each size has its season, as models have.
    const Sample sample(i, 0, sizes[(random() % 4 == 0 ? random() : i / 300) % 3]);
    ASSERT_EQ(put(*tier, sample), TierOutcome::kDone);
    written += std::ssize(sample.image);
    if (i % 50 == 0) {
      tier->tick();
      ASSERT_LE(bytes_on_disk(folder.path()), budget);
    }
  }
  const TierStats stats = tier->stats();
  EXPECT_LE(stats.bytes, budget);
  EXPECT_GE(double(stats.image_bytes), .80 * double(budget));
  EXPECT_LE(std::ssize(files_of(folder.path())), budget / (4 * kMiB) + 5);
}

TEST(DiskTier, TheEndsOfChainsMakeRoomBeforeTheirBeginnings) {
  const Folder folder;
  const auto tier = folder.open(32 * kMiB);
  for (uint32_t d = 0; d < 40; ++d)
    for (uint32_t c = 0; c < 40; ++c)
      if (put(*tier, Sample(c, d, 30000)) == TierOutcome::kOrphan)  // its beginning made room: all of it again
        for (uint32_t i = 0; i <= d; ++i) put(*tier, Sample(c, i, 30000));
  int64_t held = 0, usable = 0;
  for (uint32_t c = 0; c < 40; ++c) {
    bool leads = true;
    for (uint32_t d = 0; d < 40; ++d) {
      const bool is_there = get(*tier, Sample(c, d, 30000)) == TierOutcome::kDone;
      leads &= is_there;
      held += is_there;
      usable += leads;
    }
  }
  EXPECT_GT(held, 500);
  EXPECT_GE(double(usable), .95 * double(held));
}

// A process that is killed in the middle of its puts: the next one finds every block whose put had returned.
TEST(DiskTier, AKillAtAnyMomentLosesNothingThatWasAcknowledged) {
  const char* asked = std::getenv("PAGEDKV_KILLS");
  const int kills = asked != nullptr ? std::atoi(asked) : 20;
  std::mt19937 random(1);
  const Folder folder;
  std::set<uint32_t> acknowledged;
  for (int kill_number = 0; kill_number < kills; ++kill_number) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const auto first = uint32_t(kill_number) * 10000;
    const pid_t child = fork();
    if (child == 0) {
      close(ends[0]);
      auto tier = open_disk_tier(folder.options(256 * kMiB));
      if (!tier.ok()) _exit(1);
      for (uint32_t i = first;; ++i) {
        if (put(**tier, Sample(i, 0, 4000)) != TierOutcome::kDone) _exit(2);
        if (i % 16 == 0) (*tier)->tick();
        if (write(ends[1], &i, sizeof i) != sizeof i) _exit(3);
      }
    }
    close(ends[1]);
    const int wanted = 1 + int(random() % 60);
    uint32_t number = 0;
    for (int i = 0; i < wanted && read(ends[0], &number, sizeof number) == sizeof number; ++i)
      acknowledged.insert(number);
    usleep(random() % 3000);
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status)) << WEXITSTATUS(status);
    while (read(ends[0], &number, sizeof number) == sizeof number) acknowledged.insert(number);
    close(ends[0]);
  }
  const auto tier = folder.open(256 * kMiB);
  for (const uint32_t number : acknowledged)
    EXPECT_EQ(get(*tier, Sample(number, 0, 4000)), TierOutcome::kDone) << number;
}

// A disk that answers as it is told to.
class OddFiles : public Files {
 public:
  int write_error = 0, read_error = 0, allocate_error = 0;
  bool wrong_bytes = false;
  int64_t read_cached(int, std::span<std::byte>, int64_t) override { return -EAGAIN; }
  int64_t read(int file, std::span<std::byte> bytes, int64_t offset) override {
    if (read_error != 0) return -read_error;
    const int64_t n = Files::read(file, bytes, offset);
    if (wrong_bytes && n > 300) bytes[300] ^= std::byte{4};
    return n;
  }
  int64_t write(int file, std::span<const std::byte> bytes, int64_t offset) override {
    return write_error != 0 ? -write_error : Files::write(file, bytes, offset);
  }
  int allocate(int file, int64_t bytes) override {
    return allocate_error != 0 ? -allocate_error : Files::allocate(file, bytes);
  }
};

struct Notices {
  std::vector<std::string> lines;
  Notices() {
    set_log_sink([this](std::string_view line) { lines.emplace_back(line); });
  }
  ~Notices() { set_log_sink(nullptr); }
};

// A tier on such a disk, and what it has to say.
struct OddDisk {
  Folder folder;
  OddFiles files;
  Notices notices;
  std::unique_ptr<Tier> tier;
  OddDisk() {
    auto opened = DiskTier::open(folder.options(), files);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    if (opened.ok()) tier = std::move(*opened);
  }
};

TEST(DiskTier, ADiskThatFailsIsLeftAloneForAWhileAndSaidOnce) {
  OddDisk disk;
  ASSERT_NE(disk.tier, nullptr);
  const Sample sample(1, 0, 9000);
  EXPECT_EQ(put(*disk.tier, sample), TierOutcome::kDone);
  disk.files.read_error = disk.files.write_error = EIO;
  EXPECT_EQ(get(*disk.tier, sample), TierOutcome::kDown);
  for (uint32_t i = 2; i < 20; ++i) EXPECT_EQ(put(*disk.tier, Sample(i, 0, 9000)), TierOutcome::kDown);
  EXPECT_TRUE(disk.tier->stats().down);
  disk.files.read_error = disk.files.write_error = 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(2500));
  EXPECT_EQ(get(*disk.tier, sample), TierOutcome::kDone);
  EXPECT_FALSE(disk.tier->stats().down);
  ASSERT_EQ(disk.notices.lines.size(), 2u);
  EXPECT_NE(disk.notices.lines[0].find("does not work"), std::string::npos) << disk.notices.lines[0];
  EXPECT_NE(disk.notices.lines[1].find("works again"), std::string::npos) << disk.notices.lines[1];
}

TEST(DiskTier, AFolderThatIsDeletedIsSaidOnceAndLeftAlone) {
  std::vector<std::string> told;
  set_log_sink([&](std::string_view message) { told.emplace_back(message); });
  const Folder folder;
  const Sample first(1, 0, 8192), second(2, 0, 8192);
  {
    const auto tier = folder.open();
    EXPECT_EQ(put(*tier, first), TierOutcome::kDone);
    fs::remove_all(folder.path());
    const auto other = folder.open();  // the name is free again
    EXPECT_EQ(put(*other, second), TierOutcome::kDone);
    tier->tick();
    tier->tick();
    EXPECT_EQ(put(*tier, first), TierOutcome::kDown);
    EXPECT_EQ(get(*tier, first), TierOutcome::kDown);
    EXPECT_TRUE(tier->stats().down);
    EXPECT_EQ(get(*other, second), TierOutcome::kDone);
  }
  set_log_sink(nullptr);
  EXPECT_EQ(told.size(), 1);
  EXPECT_EQ(get(*folder.open(), second), TierOutcome::kDone);
}

TEST(DiskTier, WrongBytesAreRefusedOnceAndGone) {
  OddDisk disk;
  ASSERT_NE(disk.tier, nullptr);
  const Sample sample(1, 0, 9000);
  EXPECT_EQ(put(*disk.tier, sample), TierOutcome::kDone);
  disk.files.wrong_bytes = true;
  EXPECT_EQ(get(*disk.tier, sample), TierOutcome::kRefused);
  disk.files.wrong_bytes = false;
  EXPECT_EQ(get(*disk.tier, sample), TierOutcome::kMissing);
}

TEST(DiskTier, OnAFullDiskOlderBlocksMakeRoom) {
  OddDisk disk;
  ASSERT_NE(disk.tier, nullptr);
  EXPECT_EQ(put(*disk.tier, Sample(0, 0, 99999)), TierOutcome::kDone);
  disk.files.allocate_error = ENOSPC;
  for (uint32_t i = 1; i < 100; ++i) EXPECT_EQ(put(*disk.tier, Sample(i, 0, 99999)), TierOutcome::kDone);
  EXPECT_EQ(get(*disk.tier, Sample(99, 0, 99999)), TierOutcome::kDone);
  EXPECT_GT(disk.tier->stats().evicted, 50);
  EXPECT_EQ(disk.notices.lines.size(), 1u);
  // Another size takes the place of all that is older; where even that has no chunk, it is not stored.
  EXPECT_EQ(put(*disk.tier, Sample(0, 7, 20000, 1)), TierOutcome::kOrphan);
  EXPECT_EQ(put(*disk.tier, Sample(500, 0, 20000)), TierOutcome::kNoRoom);
}

}  // namespace
}  // namespace pagedkv
