// Any shape of a group: plan_image() refuses it, or every row and scale of a block has bytes of its own inside the
// block, the arena's views say the same, and each kernel entry stores rows of any floats there and nowhere else.
#include <fuzzer/FuzzedDataProvider.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "kernels/kernels.h"
#include "store/arena.h"
#include "tests/fuzz/require.h"

namespace pagedkv {
namespace {

constexpr int64_t kMostBytes = 1 << 16;  // of a block that is looked at byte by byte

struct Kind {  // K rows, V rows, K scales, V scales
  const Plane LayerPlanes::*plane;
  const TensorView LayerTensors::*view;
  int64_t bytes;
};
std::vector<Kind> kinds_of(const LayerShape& shape) {
  return {{&LayerPlanes::k, &LayerTensors::k, row_bytes(shape.formats.k, shape.head_dim_k).n},
          {&LayerPlanes::v, &LayerTensors::v, row_bytes(shape.formats.v, shape.head_dim_v).n},
          {&LayerPlanes::k_scales, &LayerTensors::k_scales, scale_bytes(shape.formats.k).n},
          {&LayerPlanes::v_scales, &LayerTensors::v_scales, scale_bytes(shape.formats.v).n}};
}

// Every row of a block once: inside its region's share of a block, and no byte twice.
void check_rows(const ImageLayout& layout) {
  std::map<int, std::vector<bool>> taken;
  for (const LayerPlanes& planes : layout.layers) {
    for (const Kind& kind : kinds_of(layout.shape)) {
      if (kind.bytes == 0) continue;
      const Plane& plane = planes.*kind.plane;
      const int64_t block_bytes = layout.regions.at(size_t(plane.region)).block_bytes;
      require(plane.block_stride == block_bytes);
      std::vector<bool>& bytes = taken[plane.region];
      bytes.resize(size_t(block_bytes));
      for (int64_t slot = 0; slot < layout.block_size; ++slot) {
        for (int64_t head = 0; head < layout.shape.num_kv_heads; ++head) {
          const int64_t at = plane.offset + slot * plane.slot_stride + head * plane.head_stride;
          require(at >= 0 && at + kind.bytes <= block_bytes);
          for (int64_t i = at; i < at + kind.bytes; ++i) {
            require(!bytes[size_t(i)]);
            bytes[size_t(i)] = true;
          }
        }
      }
    }
  }
}

void check_views(const Arena& arena, int64_t n_blocks) {
  const ImageLayout& layout = arena.layout();
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const LayerTensors tensors = arena.tensors(int(i), n_blocks);
    for (const Kind& kind : kinds_of(layout.shape)) {
      const Plane& plane = layout.layers[i].*kind.plane;
      const TensorView& view = tensors.*kind.view;
      if (kind.bytes == 0) {
        require(view.data == nullptr);
        continue;
      }
      require(view.data == arena.address(plane) && view.shape[3] * view.element_bytes == kind.bytes);
      require(view.shape[0] == n_blocks && view.shape[1] == layout.block_size &&
              view.shape[2] == layout.shape.num_kv_heads);
      require(view.strides[0] == plane.block_stride && view.strides[1] == plane.slot_stride &&
              view.strides[2] == plane.head_stride && view.strides[3] == view.element_bytes);
    }
  }
}

kernels::RowStore store_of(const TensorView& rows, const TensorView& scales, Format format, int64_t head_dim) {
  return {.rows = rows.data,
          .block_stride = rows.strides[0],
          .slot_stride = rows.strides[1],
          .head_stride = rows.strides[2],
          .scales = scales.data,
          .scale_block_stride = scales.strides[0],
          .scale_slot_stride = scales.strides[1],
          .scale_head_stride = scales.strides[2],
          .format = format,
          .head_dim = head_dim};
}

// Row (block 0, slot, head) is what quantize() makes of x, and dequantize() reads it back.
void check_row(const kernels::Entry& entry, const kernels::RowStore& store, const float* x, int64_t slot,
               int64_t head) {
  const int64_t n_bytes = row_bytes(store.format, store.head_dim).n;
  std::vector<std::byte> expected(static_cast<size_t>(n_bytes));
  float scale = 0;
  require(entry.quantize(x, 1, store.head_dim, store.format, expected.data(), &scale) == -1);
  const std::byte* row = store.rows + slot * store.slot_stride + head * store.head_stride;
  require(std::memcmp(row, expected.data(), expected.size()) == 0);
  float stored = 0;
  if (store.scales != nullptr) {
    std::memcpy(&stored, store.scales + slot * store.scale_slot_stride + head * store.scale_head_stride, 4);
    require(stored == scale && scale >= 1e-6f);
  }
  std::vector<float> back(size_t(store.head_dim));
  entry.dequantize(row, &stored, 1, store.head_dim, store.format, back.data());
  for (int64_t i = 0; i < store.head_dim; ++i) {
    const double value = x[i], got = back[size_t(i)];
    if (store.scales != nullptr) require(std::isinf(got) || std::fabs(value - got) <= 0.501 * double(scale));
    if (store.format == Format::kF32) require(value == got);
  }
}

void check_append(const kernels::Entry& entry, Arena& arena, FuzzedDataProvider& input) {
  const LayerShape& shape = arena.layout().shape;
  const LayerTensors tensors = arena.tensors(int(arena.layout().layers.size()) - 1, 1);
  const kernels::LayerStore layer{.k = store_of(tensors.k, tensors.k_scales, shape.formats.k, shape.head_dim_k),
                                  .v = store_of(tensors.v, tensors.v_scales, shape.formats.v, shape.head_dim_v),
                                  .block_size = arena.layout().block_size,
                                  .num_kv_heads = shape.num_kv_heads,
                                  .num_blocks = 1};
  const auto row = [&](int64_t n) {  // bytes of the input first, then zeros
    std::vector<float> x(static_cast<size_t>(n));
    const std::vector<uint8_t> bytes = input.ConsumeBytes<uint8_t>(x.size() * sizeof(float));
    if (!bytes.empty()) std::memcpy(x.data(), bytes.data(), bytes.size());
    return x;
  };
  const std::vector<float> k = row(shape.num_kv_heads * shape.head_dim_k),
                           v = row(shape.num_kv_heads * shape.head_dim_v);
  const int64_t slot = input.ConsumeIntegralInRange<int64_t>(0, layer.block_size - 1);
  const int32_t starts[] = {0, 1};
  uint64_t fault = kernels::kNoFault;
  kernels::AppendCounters counters;
  entry.append({.layer = layer,
                .batch = {.n_sequences = 1, .n_tokens = 1, .query_start_loc = starts, .slot_mapping = &slot},
                .k = {k.data(), ElementType::kF32, shape.num_kv_heads * shape.head_dim_k, shape.head_dim_k},
                .v = {v.data(), ElementType::kF32, shape.num_kv_heads * shape.head_dim_v, shape.head_dim_v},
                .faults = &fault,
                .counters = &counters},
               {});
  bool finite = true;
  for (const auto& [store, x] : {std::pair(&layer.k, &k), std::pair(&layer.v, &v)}) {
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      const float* values = x->data() + head * store->head_dim;
      bool row_finite = true;
      for (int64_t i = 0; i < store->head_dim; ++i) row_finite = row_finite && std::isfinite(values[i]);
      if (row_finite) check_row(entry, *store, values, slot, head);
      finite = finite && row_finite;
    }
  }
  require(finite == (fault == kernels::kNoFault));
}

int run(FuzzedDataProvider& input) {
  const auto number = [&](int64_t most) {  // mostly what is allowed, now and then anything
    return input.ConsumeIntegralInRange(0, 15) == 15 ? input.ConsumeIntegral<int64_t>()
                                                     : input.ConsumeIntegralInRange<int64_t>(0, most);
  };
  const auto format = [&] { return input.PickValueInArray(kAllFormats); };
  GroupSpec group;
  group.shape.formats = {format(), format()};
  group.shape.num_kv_heads = number(9);
  group.shape.head_dim_k = number(300);
  group.shape.head_dim_v = number(300);
  if (input.ConsumeBool()) group.sliding_window = number(5000);
  const int n_layers = input.ConsumeIntegralInRange(0, 4);
  for (int i = 0; i < n_layers; ++i) group.layers.push_back(i);
  const int64_t block_size = number(40);
  const ArenaOrder order = input.ConsumeBool() ? ArenaOrder::kBlockMajor : ArenaOrder::kLayerMajor;

  Result<ImageLayout> layout = plan_image(group, block_size, order);
  if (!layout.ok()) {
    require(layout.status().code() == Code::kInvalidArgument && !layout.status().message().empty());
    return 0;
  }
  require(layout->image_bytes > 0 && layout->extent_blocks > 0 && layout->extent_bytes > 0);
  if (layout->image_bytes > kMostBytes) return 0;
  check_rows(*layout);

  MemoryBudget budget{.limit = int64_t{1} << 30};
  auto arena =
      Arena::create(*layout, 1, input.ConsumeIntegralInRange<int64_t>(1, 3) * layout->extent_blocks, budget);
  if (!arena.ok() || !(*arena)->commit(0).ok()) return 0;
  check_views(**arena, layout->extent_blocks);
  for (const kernels::Entry& entry : kernels::entries()) {
    if (entry.supported()) check_append(entry, **arena, input);
  }
  return 0;
}

}  // namespace
}  // namespace pagedkv

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider input(data, size);
  return pagedkv::run(input);
}
