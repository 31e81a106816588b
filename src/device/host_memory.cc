#include "device/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "base/text.h"

namespace pagedkv {

Result<AddressRange> AddressRange::reserve(int64_t bytes) {
  AddressRange range;
  const int64_t size = round_up(bytes, kHugePage);
  const int64_t mapping_size = size + kHugePage;  // room to align inside
  void* mapping =
      mmap(nullptr, size_t(mapping_size), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    return Status(Code::kNoMemory, str("[arena] cannot reserve ", bytes_text(mapping_size),
                                       " of address space: ", std::strerror(errno)));
  }
  range.mapping_ = mapping;
  range.mapping_size_ = mapping_size;
  range.data_ = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<intptr_t>(mapping), kHugePage));
  range.size_ = size;
  return range;
}

AddressRange::~AddressRange() {
  if (mapping_ != nullptr) munmap(mapping_, size_t(mapping_size_));
}

AddressRange::AddressRange(AddressRange&& other) noexcept { *this = std::move(other); }

AddressRange& AddressRange::operator=(AddressRange&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_size_, other.mapping_size_);
  return *this;
}

Status AddressRange::commit(int64_t offset, int64_t bytes) {
  std::byte* begin = data_ + offset;
  if (mprotect(begin, size_t(bytes), PROT_READ | PROT_WRITE) != 0) {
    return Status(Code::kNoMemory, str("[arena] cannot commit ", bytes_text(bytes), ": ", std::strerror(errno)));
  }
  madvise(begin, size_t(bytes), MADV_HUGEPAGE);  // a wish: without huge pages reads are slower, not wrong
  return Status();
}

void AddressRange::decommit(int64_t offset, int64_t bytes) {
  // A fresh mapping without access also returns what strict overcommit has charged; MADV_DONTNEED would not.
  // If the system refuses (too many mappings), the memory stays until the range goes.
  (void)mmap(data_ + offset, size_t(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0);
}

int64_t AddressRange::resident(int64_t offset, int64_t bytes) const {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> pages(size_t(std::min<int64_t>(round_up(bytes, page) / page, 1 << 16)));
  int64_t total = 0;
  for (int64_t done = 0; done < bytes;) {
    const int64_t run = std::min<int64_t>(bytes - done, int64_t(pages.size()) * page);
    if (mincore(data_ + offset + done, size_t(run), pages.data()) != 0) break;
    const int64_t n_pages = round_up(run, page) / page;
    total += page * std::count_if(pages.begin(), pages.begin() + n_pages, [](unsigned char p) { return p & 1; });
    done += run;
  }
  return total;
}

namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// The number in a one-line file; kNoLimit for "max", a missing file or a nonsense value.
int64_t read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (!(file >> value) || value > uint64_t(kNoLimit)) return kNoLimit;
  return int64_t(value);
}

int64_t read_field(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  while (file >> word >> value)
    if (word == name) return value;
  return 0;
}

struct Cgroup {
  std::string folder;  // "" when there is none
  bool v2 = false;
};

// The process's memory cgroup. Inside a container the mount often shows its own cgroup as the root.
Cgroup memory_cgroup() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  Cgroup found;
  while (std::getline(file, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      if (found.folder.empty()) found = {"/sys/fs/cgroup" + path, true};
    } else if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      found = {"/sys/fs/cgroup/memory" + path, false};
    }
  }
  return found;
}

// Calls `visit(folder)` for the process's cgroup and everything above it: any of them may be the tight one.
template <class Visit>
void for_each_cgroup(const Cgroup& group, const Visit& visit) {
  const std::string root = group.v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
  std::string folder = group.folder;
  while (folder.size() >= root.size() && !folder.empty()) {
    visit(folder);
    const size_t slash = folder.find_last_of('/');
    if (slash == std::string::npos || folder == root) break;
    folder.resize(std::max(slash, root.size()));
  }
}

}  // namespace

int64_t memory_limit() {
  int64_t limit = int64_t(sysconf(_SC_PHYS_PAGES)) * int64_t(sysconf(_SC_PAGESIZE));
  const Cgroup group = memory_cgroup();
  for_each_cgroup(group, [&](const std::string& folder) {
    limit = std::min(limit, read_number(folder + (group.v2 ? "/memory.max" : "/memory.limit_in_bytes")));
  });
  return limit;
}

int64_t cgroup_room() {
  int64_t room = kNoLimit;
  const Cgroup group = memory_cgroup();
  for_each_cgroup(group, [&](const std::string& folder) {
    const int64_t limit = read_number(folder + (group.v2 ? "/memory.max" : "/memory.limit_in_bytes"));
    if (limit >= kNoLimit / 2) return;
    const int64_t used = read_number(folder + (group.v2 ? "/memory.current" : "/memory.usage_in_bytes"));
    const int64_t droppable =
        read_field(folder + "/memory.stat", group.v2 ? "inactive_file" : "total_inactive_file");
    room = std::min(room, std::max<int64_t>(0, limit - used + droppable));
  });
  return room;
}

}  // namespace pagedkv
