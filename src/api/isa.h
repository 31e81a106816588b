// The choice of a kernel entry: by name, by PAGEDKV_ISA, or the best of this machine.
#pragma once

#include <string>

#include "kernels/kernels.h"
#include "pagedkv/status.h"

namespace pagedkv {

// Errors: kInvalidArgument with the name and those that run here.
Result<const kernels::Entry*> choose_entry(const std::string& asked);

}  // namespace pagedkv
