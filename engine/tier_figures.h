// What went between the cache and its tier.
#pragma once

#include <cstdint>

#include "pagedkv/tier.h"

namespace pagedkv::engine {

struct TierFigures {
  TierStats tier;
  bool open = false;           // the model is known by its content: until then nothing is written or read
  int64_t waiting_blocks = 0;  // to be written
  // Blocks that were not stored, by reason.
  int64_t skipped_closed = 0;    // the tier was not open yet
  int64_t skipped_queue = 0;     // the disk was slower than the model
  int64_t skipped_gave_way = 0;  // the pool was full and wanted them back
  int64_t lookups = 0;           // of prompts
  int64_t restores = 0;          // that began
  int64_t restored_tokens = 0;   // that came back and were cached
  int64_t restored_bytes = 0;
  double restore_seconds = 0;  // from the first read to the last, of all restores
  // Prompts that the tier had more of, and that were computed all the same, by reason.
  int64_t not_short = 0;   // less than min_prefix
  int64_t not_faster = 0;  // computing is
  int64_t not_room = 0;    // the pool had no blocks for them
  int64_t not_late = 0;    // the tier did not answer in time
};

}  // namespace pagedkv::engine
