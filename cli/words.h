// Words of the command line as values, and options that take them.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv::cli {

// All errors: kInvalidArgument, with the word and what is allowed.
Result<int64_t> read_whole(const std::string& word, int64_t low, int64_t high);
// Any finite or infinite number, or NaN: the ranges are check_sampling's. Too large for a double is infinite.
Result<double> read_number(const std::string& word);
// "4096", "20GiB".
Result<Bytes> read_bytes(const std::string& word);

std::string wrapped(const std::string& text);

// Adds an option that takes one word; `take` stores its value, and what it refuses is a usage error. CLI11's own
// conversions are not used: they know no ranges, and read "{}" or "[a]" in a prompt as lists.
using Take = std::function<Status(const std::string& word)>;
CLI::Option* add(CLI::App& command, const std::string& names, const std::string& value_name,
                 const std::string& help, Take take);

Take whole(int64_t low, int64_t high, std::function<void(int64_t)> store);
Take text(std::optional<std::string>& target);
// A number of seconds from `low` to `high`.
Take seconds(double low, double high, double& target);

}  // namespace pagedkv::cli
