#include "device/host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
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

}  // namespace pagedkv
