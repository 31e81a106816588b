// What of a Cache tiers see: blocks with their keys, and their images.

#include "api/cache_impl.h"

namespace pagedkv {

PrefixKey Cache::root(std::string_view name_space) const { return impl_->core->root_of(name_space); }
std::vector<KeyedBlock> Cache::take_keyed() { return impl_->core->take_keyed(); }
Status Cache::let_go(const KeyedBlock& block) { return impl_->core->let_go(block.group, block.block); }

void Cache::read_image(int group, BlockId block, std::span<std::byte> image) const {
  PKV_CHECK(impl_->has_group(group) && int64_t(image.size()) == image_bytes(group).n);
  impl_->arenas[size_t(group)]->read_image(uint32_t(block), image);
}

void Cache::write_image(int group, BlockId block, std::span<const std::byte> image) {
  PKV_CHECK(impl_->has_group(group) && int64_t(image.size()) == image_bytes(group).n);
  impl_->arenas[size_t(group)]->write_image(uint32_t(block), image);
}

Result<Restore> Cache::begin_restore(std::span<const int32_t> prompt, const PrefixMatch& match, Blocks n) {
  return impl_->core->begin_restore(prompt, match, n.n);
}

Tokens Cache::end_restore(Restore&& restore, std::span<const int32_t> prompt, const PrefixMatch& match,
                          const std::vector<bool>& filled) {
  PKV_CHECK(filled.size() == restore.places.size());
  const Restore ended = std::move(restore);
  return Tokens(impl_->core->end_restore(ended, prompt, match, filled));
}

}  // namespace pagedkv
