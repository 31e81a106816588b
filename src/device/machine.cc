#include "pagedkv/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace pagedkv {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return line;
}

std::optional<int64_t> number_in(const std::string& path) {
  const auto line = first_line(path);
  if (!line) return std::nullopt;
  std::istringstream in(*line);
  int64_t value = 0;
  if (!(in >> value)) return std::nullopt;  // "max"
  return value;
}

// The number after `name` in a file of lines that begin so; 0 where it is missing.
int64_t field_in(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream in(line);
    std::string word;
    int64_t value = 0;
    if (in >> word >> value && word == name) return value;
  }
  return 0;
}

// The folders whose limits hold for this process: its own cgroup and all above it, up to the root. Inside a
// container the path in /proc/self/cgroup may not exist below the mount; then the root stands for it.
//   controller  "" for cgroup v2, else the v1 controller's name
std::vector<std::string> cgroup_folders(const MachineFiles& files, const std::string& controller) {
  std::vector<std::string> folders;
  std::ifstream self(files.self_cgroup);
  for (std::string line; std::getline(self, line);) {
    // hierarchy-id:controller,controller:/path
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? !names.empty()
                           : ("," + names + ",").find("," + controller + ",") == std::string::npos) {
      continue;
    }
    const std::string root = files.cgroup_root + (controller.empty() ? "" : "/" + controller);
    std::string path = line.substr(second + 1);
    while (path.size() > 1 || (path.size() == 1 && path[0] != '/')) {
      folders.push_back(root + (path[0] == '/' ? "" : "/") + path);
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos || slash == 0) break;
      path.resize(slash);
    }
    folders.push_back(root);
    break;
  }
  return folders;
}

// How the two versions call the same things.
struct MemoryNames {
  const char* controller;
  const char* limit;
  const char* used;
  const char* droppable;  // in memory.stat
};
constexpr MemoryNames kMemoryNames[] = {
    {"", "/memory.max", "/memory.current", "inactive_file"},
    {"memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"}};

// Calls visit(folder, names, limit) for every cgroup that limits this process's memory.
template <class Visit>
void for_each_memory_limit(const MachineFiles& files, const Visit& visit) {
  for (const MemoryNames& names : kMemoryNames) {
    for (const std::string& folder : cgroup_folders(files, names.controller)) {
      const int64_t limit = number_in(folder + names.limit).value_or(0);
      // v1 says "no limit" with a huge number.
      if (limit > 0 && limit < kNoLimit / 2) visit(folder, names, limit);
    }
  }
}

}  // namespace

int64_t ram_bytes(const MachineFiles& files) {
  const int64_t kib = field_in(files.meminfo, "MemTotal:");
  if (kib > 0 && kib < kNoLimit / 1024) return kib * 1024;
  return int64_t(sysconf(_SC_PHYS_PAGES)) * int64_t(sysconf(_SC_PAGESIZE));
}

int64_t cgroup_memory(const MachineFiles& files) {
  int64_t least = kNoLimit;
  for_each_memory_limit(
      files, [&](const std::string&, const MemoryNames&, int64_t limit) { least = std::min(least, limit); });
  return least;
}

int64_t memory_limit(const MachineFiles& files) { return std::min(ram_bytes(files), cgroup_memory(files)); }

int64_t cgroup_room(const MachineFiles& files) {
  int64_t room = kNoLimit;
  for_each_memory_limit(files, [&](const std::string& folder, const MemoryNames& names, int64_t limit) {
    const int64_t used = number_in(folder + names.used).value_or(limit);
    const int64_t droppable = field_in(folder + "/memory.stat", names.droppable);
    room = std::min(room, std::max<int64_t>(0, limit - used + droppable));
  });
  return room;
}

int cgroup_cpus(const MachineFiles& files) {
  double least = 0;
  auto take = [&](int64_t quota, int64_t period) {
    if (quota <= 0 || period <= 0) return;
    const double cpus = double(quota) / double(period);
    least = least == 0 ? cpus : std::min(least, cpus);
  };
  for (const std::string& folder : cgroup_folders(files, "")) {
    const auto line = first_line(folder + "/cpu.max");  // "200000 100000" or "max 100000"
    if (!line) continue;
    std::istringstream in(*line);
    int64_t quota = 0, period = 0;
    if (in >> quota >> period) take(quota, period);
  }
  for (const std::string& folder : cgroup_folders(files, "cpu")) {
    take(number_in(folder + "/cpu.cfs_quota_us").value_or(-1),
         number_in(folder + "/cpu.cfs_period_us").value_or(0));
  }
  if (least == 0) return 0;
  return int(std::min(least, 1e6) + 0.999);
}

int affinity_cpus() {
  // Machines with more CPUs than cpu_set_t holds make the call fail with EINVAL: ask with a larger set.
  for (int n = CPU_SETSIZE; n <= (1 << 16); n *= 4) {
    cpu_set_t* set = CPU_ALLOC(n);
    if (!set) break;
    const size_t size = CPU_ALLOC_SIZE(n);
    const int count = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  return std::max(1, int(sysconf(_SC_NPROCESSORS_ONLN)));
}

}  // namespace pagedkv
