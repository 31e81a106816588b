// Groups of layers, the two arena orders, and the tensor views over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pagedkv/export.h"
#include "pagedkv/format.h"
#include "pagedkv/units.h"

namespace pagedkv {

enum class ArenaOrder : uint8_t {
  kBlockMajor,  // a block's image (all layers of its group) is one contiguous run; rows head-major inside
  kLayerMajor,  // each layer's K is one contiguous [num_blocks, block_size, num_kv_heads, head_dim] tensor
};
PKV_API const char* arena_order_name(ArenaOrder order);  // "block_major", "layer_major"

// Layers that share block shape, format and lifetime rule.
struct GroupSpec {
  LayerShape shape;
  int64_t sliding_window = 0;  // keys a query sees, its own position included; 0: all (full attention)
  std::vector<int> layers;     // the model's layer indices, in order; each layer belongs to one group
};

// A zero-copy view of one layer's K, V or scales: [num_blocks, block_size, num_kv_heads, width]. Strides are in
// bytes. Width is head_dim for off formats, the packed byte count for quantized ones, 1 for scales.
// Valid until the cache is destroyed; growth never moves it. Blocks that are not committed must not be touched.
struct TensorView {
  std::byte* data = nullptr;
  int64_t element_bytes = 0;
  int64_t shape[4] = {};
  int64_t strides[4] = {};
  bool contiguous() const {
    return strides[3] == element_bytes && strides[2] == shape[3] * strides[3] &&
           strides[1] == shape[2] * strides[2] && strides[0] == shape[1] * strides[1];
  }
};

struct LayerTensors {
  TensorView k, v;
  TensorView k_scales, v_scales;  // data == nullptr for formats without scales
};

}  // namespace pagedkv
