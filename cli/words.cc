#include "cli/words.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <limits>
#include <sstream>
#include <utility>

namespace pagedkv::cli {
namespace {

constexpr size_t kHelpWidth = 76;

}  // namespace

Result<int64_t> read_whole(const std::string& word, int64_t low, int64_t high) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error == std::errc() && end == word.data() + word.size() && value >= low && value <= high) return value;
  return invalid_argument(fmt::format("\"{}\" is not a whole number from {} to {}", word, low, high));
}

Result<double> read_number(const std::string& word) {
  double value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (end != word.data() + word.size() || error == std::errc::invalid_argument)
    return invalid_argument(fmt::format("\"{}\" is not a number", word));
  return error == std::errc() ? value : std::numeric_limits<double>::infinity();
}

Result<Bytes> read_bytes(const std::string& word) {
  constexpr int64_t kMax = int64_t{1} << 46;
  int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  std::string unit(end, word.data() + word.size());
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::tolower(c); });
  const int shift = unit.empty() ? 0 : unit == "kib" ? 10 : unit == "mib" ? 20 : unit == "gib" ? 30 : -1;
  if (error != std::errc() || shift < 0 || value < 1 || value > (kMax >> shift)) {
    return invalid_argument(fmt::format(
        "\"{}\" is not a size from 1 to {} bytes (64 TiB): a whole number, with KiB, MiB or GiB if wanted", word,
        kMax));
  }
  return Bytes(value << shift);
}

std::string wrapped(const std::string& text) {
  std::istringstream words(text);
  std::string lines, line;
  for (std::string word; words >> word;) {
    if (!line.empty() && line.size() + 1 + word.size() > kHelpWidth) lines += line + "\n", line.clear();
    line += (line.empty() ? "" : " ") + word;
  }
  return lines + line;
}

CLI::Option* add(CLI::App& command, const std::string& names, const std::string& value_name,
                 const std::string& help, Take take) {
  const std::string first = names.substr(0, names.find(','));
  const std::string shown = names.find("--") == std::string::npos ? first : names.substr(names.find("--"));
  const std::string name = shown.substr(0, shown.find(','));
  return command
      .add_option(
          names,
          [take = std::move(take), name](const CLI::results_t& words) {
            for (const std::string& word : words)
              if (Status status = take(word); !status.ok()) throw CLI::ValidationError(name, status.message());
            return true;
          },
          wrapped(help))
      ->type_name(value_name)
      ->type_size(1)
      ->expected(1);
}

Take whole(int64_t low, int64_t high, std::function<void(int64_t)> store) {
  return [low, high, store = std::move(store)](const std::string& word) {
    const auto value = read_whole(word, low, high);
    if (value.ok()) store(*value);
    return value.status();
  };
}

Take text(std::optional<std::string>& target) {
  return [&target](const std::string& word) {
    target = word;
    return Status();
  };
}

Take seconds(double low, double high, double& target) {
  return [low, high, &target](const std::string& word) {
    const auto value = read_number(word);
    if (!value.ok()) return value.status();
    if (!(*value >= low && *value <= high))
      return invalid_argument(fmt::format("\"{}\" is not from {} to {}", word, low, high));
    target = *value;
    return Status();
  };
}

}  // namespace pagedkv::cli
