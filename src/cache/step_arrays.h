// The integer arrays of one step, as the cache fills them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/orders.h"
#include "pagedkv/units.h"

namespace pagedkv {

struct StepSequence {
  SequenceId id;
  int64_t old_length = 0;
  int64_t n_new = 0;
};

struct StepArrays {
  struct Group {
    int64_t max_blocks = 0;             // width of a table row
    std::vector<int32_t> block_tables;  // [n_sequences, max_blocks], -1 where nothing is held
    std::vector<int64_t> slot_mapping;  // [n_tokens]
  };
  uint64_t step = 0;  // identifies the reservation; 0: ended
  Orders orders;      // of the reservation, to be carried out before its rows are written
  std::vector<StepSequence> sequences;
  std::vector<uint64_t> versions;        // of a plan that reads: the states of its sequences that it describes
  std::vector<int32_t> seq_lens;         // [n_sequences]
  std::vector<int32_t> query_start_loc;  // [n_sequences + 1]
  std::vector<int32_t> positions;        // [n_tokens]
  std::vector<Group> groups;
};

}  // namespace pagedkv
