// What this process may use of the machine: CPUs and memory, by affinity and cgroup limits (v1 and v2).
#pragma once

#include <cstdint>
#include <string>

namespace pagedkv::engine {

// Where to look. Tests point it at files of their own.
struct MachineFiles {
  std::string meminfo = "/proc/meminfo";
  std::string self_cgroup = "/proc/self/cgroup";
  std::string cgroup_root = "/sys/fs/cgroup";
};

// CPUs worth of time per second that the tightest cgroup quota allows, rounded up; 0: no quota.
int cgroup_cpus(const MachineFiles& files = {});
// RAM, and the tightest cgroup limit, in bytes; INT64_MAX when there is none or it cannot be read.
int64_t ram_bytes(const MachineFiles& files = {});
int64_t cgroup_memory(const MachineFiles& files = {});
// The smaller of the two.
int64_t memory_limit(const MachineFiles& files = {});
// CPUs in this thread's affinity mask; at least 1.
int affinity_cpus();

}  // namespace pagedkv::engine
