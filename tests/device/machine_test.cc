// Limits of the machine, read from files of the test's own.
#include "pagedkv/machine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace pagedkv {
namespace {

class Machine : public testing::Test {
 protected:
  Machine() {
    root_ = std::filesystem::temp_directory_path() / ("pagedkv-machine-" + std::to_string(getpid()));
    std::filesystem::remove_all(root_);
    put("meminfo", "MemTotal:       16384 kB\nMemFree:   1 kB\n");
  }
  ~Machine() override { std::filesystem::remove_all(root_); }
  void put(const std::string& name, const std::string& contents) {
    std::filesystem::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << contents;
  }
  MachineFiles files() const {
    return {.meminfo = root_ / "meminfo", .self_cgroup = root_ / "self", .cgroup_root = root_ / "cgroup"};
  }
  std::filesystem::path root_;
};

TEST_F(Machine, HasItsMemoryWhereNoCgroupLimitsIt) {
  EXPECT_EQ(memory_limit(files()), 16384 * 1024);
  EXPECT_EQ(cgroup_cpus(files()), 0);
}

TEST_F(Machine, ObeysTheTightestLimitOfCgroupV2OnItsWayUp) {
  put("self", "0::/a/b\n");
  put("cgroup/a/b/memory.max", "max\n");
  put("cgroup/a/memory.max", "5000000\n");
  put("cgroup/a/b/cpu.max", "350000 100000\n");
  put("cgroup/a/cpu.max", "max 100000\n");
  EXPECT_EQ(memory_limit(files()), 5000000);
  EXPECT_EQ(cgroup_cpus(files()), 4);  // 3.5, rounded up
}

TEST_F(Machine, FindsTheRootsLimitsWhereItsOwnPathIsNotMounted) {
  put("self", "0::/docker/0123456789\n");
  put("cgroup/memory.max", "7000000\n");
  put("cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(memory_limit(files()), 7000000);
  EXPECT_EQ(cgroup_cpus(files()), 1);
}

TEST_F(Machine, ObeysCgroupV1) {
  put("self", "4:memory:/job\n3:cpu,cpuacct:/job\n");
  put("cgroup/memory/job/memory.limit_in_bytes", "6000000\n");
  put("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");  // v1's way to say none
  put("cgroup/cpu/job/cpu.cfs_quota_us", "200000\n");
  put("cgroup/cpu/job/cpu.cfs_period_us", "100000\n");
  put("cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(memory_limit(files()), 6000000);
  EXPECT_EQ(cgroup_cpus(files()), 2);
}

TEST_F(Machine, HasTheRoomThatTheTightestCgroupLeaves) {
  EXPECT_EQ(cgroup_room(files()), INT64_MAX);
  put("self", "0::/a/b\n");
  put("cgroup/a/b/memory.max", "5000000\n");
  put("cgroup/a/b/memory.current", "1000000\n");
  put("cgroup/a/memory.max", "6000000\n");
  put("cgroup/a/memory.current", "5500000\n");
  put("cgroup/a/memory.stat", "anon 5000000\ninactive_file 200000\n");
  EXPECT_EQ(cgroup_room(files()), 700000);  // what is clean can be dropped
  put("self", "4:memory:/job\n");
  put("cgroup/memory/job/memory.limit_in_bytes", "300\n");
  put("cgroup/memory/job/memory.usage_in_bytes", "400\n");
  EXPECT_EQ(cgroup_room(files()), 0);
}

TEST_F(Machine, HasAtLeastOneCpu) { EXPECT_GE(affinity_cpus(), 1); }

}  // namespace
}  // namespace pagedkv
