// Memory of blocks: layouts, growth without a move or a copy, memory that goes back, and limits.

#include "store/arena.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>

#include "pagedkv/log.h"
#include "pagedkv/machine.h"

namespace pagedkv {
namespace {

GroupSpec group(int64_t heads, int64_t dk, int64_t dv, KvQuantConfig formats, int layers = 2) {
  GroupSpec spec{.shape = {heads, dk, dv, formats}};
  for (int i = 0; i < layers; ++i) spec.layers.push_back(i);
  return spec;
}
constexpr KvQuantConfig kF16Only{Format::kF16, Format::kF16}, kQ8Only{Format::kQ8, Format::kQ8};

TEST(ImageLayout, SmolLm2NeedsNoPaddingInAnyFormat) {
  for (const Format format : {Format::kF16, Format::kQ8, Format::kQ6, Format::kQ4}) {
    const GroupSpec spec = group(3, 64, 64, {format, format}, 30);
    const auto layout = plan_image(spec, 16, ArenaOrder::kBlockMajor);
    ASSERT_TRUE(layout.ok());
    EXPECT_EQ(layout->image_bytes, 16 * 30 * bytes_per_token(spec.shape).n);
  }
}

TEST(ImageLayout, EveryPlaneIsAlignedAndNoTwoOverlap) {
  for (const int64_t dim : {4, 8, 64, 80, 100})
    for (const int64_t block_size : {1, 3, 16, 48, 256}) {
      const GroupSpec spec = group(3, dim, dim + 4, {Format::kQ6, Format::kQ4}, 3);
      const auto layout = plan_image(spec, block_size, ArenaOrder::kBlockMajor);
      ASSERT_TRUE(layout.ok());
      EXPECT_EQ(layout->image_bytes % kImageAlign, 0);
      int64_t end = 0;
      for (const LayerPlanes& planes : layout->layers) {
        for (const auto& [plane, row] :
             {std::pair(planes.k, row_bytes(Format::kQ6, dim).n),
              std::pair(planes.v, row_bytes(Format::kQ4, dim + 4).n), std::pair(planes.k_scales, int64_t{4}),
              std::pair(planes.v_scales, int64_t{4})}) {
          EXPECT_EQ(plane.offset % kPlaneAlign, 0);
          EXPECT_GE(plane.offset, end);
          EXPECT_EQ(plane.slot_stride, row);
          EXPECT_EQ(plane.head_stride, row * block_size);
          end = plane.offset + row * block_size * 3;
        }
      }
      EXPECT_LE(end, layout->image_bytes);
    }
}

TEST(ImageLayout, LayerMajorOffAndQ8AreTheContiguousTensorsThatOtherKernelsExpect) {
  for (const KvQuantConfig formats : {kF16Only, kQ8Only}) {
    MemoryBudget budget{.limit = int64_t{1} << 30};
    auto arena =
        Arena::create(plan_image(group(3, 64, 64, formats), 16, ArenaOrder::kLayerMajor).value(), 64, 64, budget);
    ASSERT_TRUE(arena.ok());
    const LayerTensors t = (*arena)->tensors(1, 64);
    EXPECT_TRUE(t.k.contiguous() && t.v.contiguous());
    EXPECT_EQ(t.k.shape[1], 16);
    EXPECT_EQ(t.k.shape[2], 3);
    EXPECT_EQ(t.k.shape[3], 64);
    if (formats == kQ8Only) {
      EXPECT_TRUE(t.k_scales.contiguous());
      EXPECT_EQ(t.k_scales.shape[3], 1);
    }
  }
}

TEST(ImageLayout, ValuesOutOfRangeAreNamedWithTheirLimit) {  // O-NUM-08, O-NUM-13
  const auto message = [](const GroupSpec& spec, int64_t block_size) {
    const auto layout = plan_image(spec, block_size, ArenaOrder::kBlockMajor);
    EXPECT_EQ(layout.status().code(), Code::kInvalidArgument);
    return layout.status().message();
  };
  EXPECT_NE(message(group(3, 64, 64, kF16Only), int64_t{1} << 40).find("1099511627776"), std::string::npos);
  EXPECT_NE(message(group(3, 64, 64, kF16Only), 0).find("block_size is 0"), std::string::npos);
  for (const int64_t kv : {int64_t{-1}, int64_t{0}, int64_t{4097}}) {
    const std::string text = message(group(kv, 64, 64, kF16Only), 16);
    EXPECT_NE(text.find("num_kv_heads is " + std::to_string(kv)), std::string::npos) << text;
  }
  EXPECT_FALSE(plan_image(group(1, 66, 66, {Format::kQ6, Format::kQ6}), 16, ArenaOrder::kBlockMajor).ok());
}

TEST(Arena, GrowthMovesNothingCopiesNothingAndFallingUseGivesMemoryBack) {  // O-MEM-02, O-MEM-03
  for (const ArenaOrder order : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor}) {
    MemoryBudget budget{.limit = int64_t{1} << 30};
    auto made = Arena::create(plan_image(group(4, 64, 64, kQ8Only), 16, order).value(), 1, 4000, budget);
    ASSERT_TRUE(made.ok());
    Arena& arena = **made;
    std::byte* base = arena.tensors(1, 4000).k.data;
    const int64_t extent = arena.layout().extent_blocks;
    for (int64_t e = 0; e * extent < 4000; ++e) {
      ASSERT_TRUE(arena.commit(e).ok());
      const LayerTensors t = arena.tensors(1, 4000);
      EXPECT_EQ(t.k.data, base);
      for (int64_t b = e * extent; b < std::min<int64_t>(4000, (e + 1) * extent); ++b) {
        std::memset(t.k.data + b * t.k.strides[0], int(b % 251) + 1, 64);
        std::memset(t.v_scales.data + b * t.v_scales.strides[0], int(b % 251) + 1, 4);
      }
    }
    const LayerTensors t = arena.tensors(1, 4000);
    for (int64_t b = 0; b < 4000; ++b) EXPECT_EQ(int(t.k.data[b * t.k.strides[0]]), int(b % 251) + 1);
    const int64_t full = arena.bytes_resident();
    EXPECT_GT(full, 0);
    EXPECT_LE(full, arena.bytes_committed());
    for (int64_t e = (4000 + extent - 1) / extent - 1; e > 0; --e) arena.decommit(e);
    EXPECT_LE(arena.bytes_committed(), arena.layout().extent_bytes + 4 * kHugePage);
    EXPECT_LT(arena.bytes_resident(), full / 4);
    for (int64_t b = 0; b < extent; ++b) EXPECT_EQ(int(t.k.data[b * t.k.strides[0]]), int(b % 251) + 1);
    ASSERT_TRUE(arena.commit(1).ok());
    arena.decommit(1);
    arena.decommit(0);
    EXPECT_EQ(arena.bytes_committed(), 0);
    EXPECT_EQ(budget.committed, 0);
  }
}

TEST(Arena, AnyOrderOfCommitsAndDecommitsKeepsTheAccounts) {
  MemoryBudget budget{.limit = int64_t{1} << 30};
  auto made = Arena::create(plan_image(group(3, 64, 64, kF16Only, 5), 16, ArenaOrder::kBlockMajor).value(), 1, 2000,
                            budget);
  ASSERT_TRUE(made.ok());
  Arena& arena = **made;
  const int64_t extents = 2000 / arena.layout().extent_blocks;
  std::vector<bool> committed(static_cast<size_t>(extents));
  uint32_t state = 1;
  for (int i = 0; i < 2000; ++i) {
    state = state * 1664525u + 1013904223u;
    const int64_t e = (state >> 8) % extents;
    if (committed[size_t(e)])
      arena.decommit(e);
    else
      ASSERT_TRUE(arena.commit(e).ok());
    committed[size_t(e)] = !committed[size_t(e)];
    for (int64_t c = 0; c < extents; ++c) {  // what is committed can be touched
      if (!committed[size_t(c)]) continue;
      std::byte* first =
          arena.tensors(0, 2000).k.data + c * arena.layout().extent_blocks * arena.layout().image_bytes;
      first[0] = std::byte{1};
      first[arena.layout().extent_blocks * arena.layout().image_bytes - 1] = std::byte{1};
    }
  }
  EXPECT_EQ(budget.committed, arena.bytes_committed());
  for (int64_t e = 0; e < extents; ++e)
    if (committed[size_t(e)]) arena.decommit(e);
  EXPECT_EQ(budget.committed, 0);
}

TEST(Arena, TheBudgetIsCheckedBeforeTheSystemIsAsked) {
  MemoryBudget budget{.limit = 4 << 20};
  auto made =
      Arena::create(plan_image(group(4, 64, 64, kF16Only), 16, ArenaOrder::kBlockMajor).value(), 1, 10000, budget);
  ASSERT_TRUE(made.ok());
  ASSERT_TRUE((*made)->commit(0).ok());
  ASSERT_TRUE((*made)->commit(1).ok());
  const Status status = (*made)->commit(2);
  EXPECT_EQ(status.code(), Code::kCapacity);
  EXPECT_NE(status.message().find("kv_memory 4.0 MiB"), std::string::npos) << status.message();
  EXPECT_EQ((*made)->bytes_committed(), budget.committed);
}

TEST(Arena, ASpaceBeyondFourGiBIsReservedWithoutMemory) {
  MemoryBudget budget{.limit = int64_t{1} << 40};
  auto made = Arena::create(plan_image(group(32, 128, 128, kF16Only, 4), 16, ArenaOrder::kBlockMajor).value(), 1,
                            200000, budget);
  ASSERT_TRUE(made.ok());
  EXPECT_GT((*made)->bytes_reserved(), int64_t{1} << 36);
  EXPECT_EQ((*made)->bytes_resident(), 0);
  ASSERT_TRUE((*made)->commit(100000 / (*made)->layout().extent_blocks).ok());
  std::byte* far = (*made)->tensors(0, 200000).k.data + int64_t{100000} * (*made)->layout().image_bytes;
  far[0] = std::byte{7};
  EXPECT_GT((*made)->bytes_resident(), 0);
  EXPECT_LE((*made)->bytes_resident(), (*made)->layout().extent_bytes);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Runs `body` in a child process and returns its exit code.
template <class Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(Arena, UnderUlimitVTheReservationIsHalvedUntilItFitsAndThatIsReported) {
  const int code = in_child([] {
    int notices = 0;
    set_log_sink([&](std::string_view) { ++notices; });
    const rlimit limit{rlim_t{2} << 30, rlim_t{2} << 30};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 2;
    MemoryBudget budget{.limit = int64_t{1} << 40};
    auto made = Arena::create(plan_image(group(32, 128, 128, kF16Only, 4), 16, ArenaOrder::kBlockMajor).value(), 1,
                              200000, budget);
    if (!made.ok()) return 3;
    if ((*made)->bytes_reserved() > int64_t{2} << 30 || (*made)->max_blocks() < 100) return 4;
    if (notices != 1) return 5;
    if (!(*made)->commit(0).ok()) return 6;
    (*made)->tensors(0, 1).k.data[0] = std::byte{1};
    return 0;
  });
  EXPECT_EQ(code, 0);
}

// A memory cgroup of this test's own below the one it runs in; empty where cgroups cannot be made.
std::string make_cgroup(int64_t limit) {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const bool v1 = line.find(":memory:") != std::string::npos, v2 = line.starts_with("0::");
    if (!v1 && !v2) continue;
    const std::string own = line.substr(line.rfind(':') + 1);
    const std::string folder =
        (v1 ? "/sys/fs/cgroup/memory" : "/sys/fs/cgroup") + own + "/pagedkv_test_" + std::to_string(getpid());
    if (mkdir(folder.c_str(), 0755) != 0) continue;
    std::ofstream out(folder + (v1 ? "/memory.limit_in_bytes" : "/memory.max"));
    if (out << limit << std::flush) return folder;
    rmdir(folder.c_str());
  }
  return {};
}

TEST(Arena, UnderACgroupTheLimitIsAMessageAndNotAKill) {
  const std::string folder = make_cgroup(int64_t{128} << 20);
  if (folder.empty()) GTEST_SKIP() << "no memory cgroup can be made here";
  const int code = in_child([&] {
    std::ofstream(folder + "/cgroup.procs") << getpid() << std::flush;
    if (memory_limit() != int64_t{128} << 20) return 2;
    MemoryBudget budget{.limit = int64_t{1} << 40};
    auto made = Arena::create(plan_image(group(32, 128, 128, kF16Only, 4), 16, ArenaOrder::kBlockMajor).value(), 1,
                              4000, budget);
    if (!made.ok()) return 3;
    for (int64_t extent = 0; extent < 2000; ++extent) {
      const Status status = (*made)->commit(extent);
      if (status.ok()) {  // touch it all
        std::memset((*made)->tensors(0, 4000).k.data + extent * (*made)->layout().extent_bytes, 1,
                    size_t((*made)->layout().extent_bytes));
        continue;
      }
      if (status.code() != Code::kNoMemory || status.message().find("cgroup") == std::string::npos) return 4;
      return extent > 20 && extent < 64 ? 0 : 5;
    }
    return 6;
  });
  rmdir(folder.c_str());
  EXPECT_EQ(code, 0);
}

TEST(Arena, WhereNotEvenTheSmallestPoolFitsTheErrorIsTyped) {
  const int code = in_child([] {
    const rlimit limit{rlim_t{1} << 30, rlim_t{1} << 30};
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 2;
    MemoryBudget budget{.limit = int64_t{1} << 40};
    auto made = Arena::create(plan_image(group(32, 128, 128, kF16Only, 4), 16, ArenaOrder::kBlockMajor).value(),
                              2000, 4000, budget);
    return made.ok() || made.status().code() != Code::kNoMemory ? 3 : 0;
  });
  EXPECT_EQ(code, 0);
}
#endif

}  // namespace
}  // namespace pagedkv
