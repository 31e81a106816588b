// Checks of a file's vocabulary that libllama answers with an abort instead of an error.
#pragma once

#include "engine/gguf_file.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

// Tokenizer known, no token twice, and a beginning (end) token that exists where one is to be added.
// Requires: the file has 'tokenizer.ggml.tokens', an array of strings. Errors: kCorrupt, kUnsupported.
Status check_vocabulary(const GgufFile& file);

}  // namespace pagedkv::engine
