#include "engine/machine.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace pagedkv::engine {
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

}  // namespace

int cgroup_cpus(const MachineFiles& files) {
  double least = 0;
  auto take = [&](int64_t quota, int64_t period) {
    if (quota <= 0 || period <= 0) return;
    const double cpus = static_cast<double>(quota) / static_cast<double>(period);
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
  return static_cast<int>(std::min(least, 1e6) + 0.999);
}

int64_t ram_bytes(const MachineFiles& files) {
  std::ifstream meminfo(files.meminfo);
  for (std::string line; std::getline(meminfo, line);) {
    if (!line.starts_with("MemTotal:")) continue;
    std::istringstream in(line.substr(9));
    int64_t kib = 0;
    if (in >> kib && kib > 0 && kib < kNoLimit / 1024) return kib * 1024;
    break;
  }
  return kNoLimit;
}

int64_t cgroup_memory(const MachineFiles& files) {
  int64_t limit = kNoLimit;
  auto take = [&](std::optional<int64_t> bytes) {
    if (bytes && *bytes > 0) limit = std::min(limit, *bytes);
  };
  for (const std::string& folder : cgroup_folders(files, "")) take(number_in(folder + "/memory.max"));
  for (const std::string& folder : cgroup_folders(files, "memory"))
    take(number_in(folder + "/memory.limit_in_bytes"));
  return limit;
}

int64_t memory_limit(const MachineFiles& files) { return std::min(ram_bytes(files), cgroup_memory(files)); }

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
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int default_threads() {
  const int quota = cgroup_cpus();
  const int cpus = affinity_cpus();
  return std::max(1, quota > 0 ? std::min(quota, cpus) : cpus);
}

MachineMemory machine_memory(const ModelInfo& model) {
  const int64_t ram = ram_bytes(), cgroup = cgroup_memory();
  const int64_t limit = std::min(ram, cgroup);
  const int64_t rest = std::max<int64_t>(limit - model.weight_bytes, 0);
  // Large weights would leave nothing of a half; an eighth of what they do leave still lets the model run.
  const int64_t kv = std::max(limit / 2 - model.weight_bytes, rest / 8);
  // cgroup v1 says "no limit" with a huge number.
  const auto known = [](int64_t bytes) {
    return bytes > (kNoLimit >> 1) ? std::nullopt : std::optional(Bytes(bytes));
  };
  return {.limit = Bytes(limit), .default_kv_memory = Bytes(kv), .ram = known(ram), .cgroup = known(cgroup)};
}

}  // namespace pagedkv::engine
