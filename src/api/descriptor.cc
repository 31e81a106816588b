#include "api/descriptor.h"

namespace pagedkv {
namespace {

constexpr int64_t kVersion = 1;  // of the record and of the bytes of every format

class Record {
 public:
  Record& number(int64_t value) {
    for (int byte = 0; byte < 8; ++byte) bytes_ += char(uint64_t(value) >> (8 * byte) & 0xff);
    return *this;
  }
  Record& text(std::string_view value) {
    number(int64_t(value.size()));
    bytes_ += value;
    return *this;
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

}  // namespace

std::string describe(const CacheOptions& options, std::span<const ProductPaths> paths) {
  Record record;
  record.text("pagedkv").number(kVersion).text(options.fingerprint);
  record.number(options.block_size.n).text(arena_order_name(options.arena)).number(int64_t(options.groups.size()));
  for (size_t g = 0; g < options.groups.size(); ++g) {
    const GroupSpec& group = options.groups[g];
    record.text(kv_quant_name(group.shape.formats)).number(group.shape.num_kv_heads);
    record.number(group.shape.head_dim_k).number(group.shape.head_dim_v);
    record.number(0).number(kMaxTokens);  // the positions that the group stores
    record.number(group.sliding_window);
    record.text("none");  // how K is rotated before it is stored
    // Deeper layers' K and V come out of attention, and so depend on how it multiplies.
    record.number(paths[g].k_codes).number(paths[g].v_codes);
    record.number(int64_t(group.layers.size()));
    for (const int layer : group.layers) record.number(layer);
  }
  return record.take();
}

Key descriptor_of(const CacheOptions& options, std::span<const ProductPaths> paths) {
  return sha256(describe(options, paths));
}

}  // namespace pagedkv
