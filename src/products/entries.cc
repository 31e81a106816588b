// The table of product entries, best first: the instruction sets of the kernels, by their checks of this machine.
#include "kernels/kernels.h"
#include "products/products.h"

namespace pagedkv::products {
namespace {

struct Table {
  Entry entries[5];
  size_t size = 0;

  Table() {
    for (const kernels::Entry& kernel : kernels::entries()) {
      const IsaFunctions* f = functions_of(kernel.name);
      if (f == nullptr) continue;
      entries[size++] = {
          .name = kernel.name, .supported = kernel.supported, .quantize = f->quantize, .product = f->product};
    }
  }
  static const IsaFunctions* functions_of(std::string_view name) {
    if (name == "avx512_vnni") return avx512_vnni_functions();
    if (name == "avx512") return avx512_functions();
    if (name == "avx2") return avx2_functions();
    if (name == "scalar") return scalar_functions();
    return nullptr;
  }
};

}  // namespace

std::span<const Entry> entries() {
  static const Table table;
  return {table.entries, table.size};
}

const Entry* find_entry(std::string_view name) {
  for (const Entry& entry : entries())
    if ((name.empty() || entry.name == name) && entry.supported()) return &entry;
  return nullptr;
}

}  // namespace pagedkv::products
