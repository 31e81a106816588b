#include "cli/console.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <set>
#include <utility>

#include "cli/output.h"
#include "pagedkv/log.h"

namespace pagedkv::cli {
namespace {

// Color only for people, and not for those who said no: https://no-color.org
bool use_color() {
  const char* no_color = std::getenv("NO_COLOR");
  return is_terminal(stderr) && (no_color == nullptr || *no_color == '\0');
}

void print_error(const std::string& line) {
  const bool color = use_color();
  print_err("{}pagedkv:{} {}\n", color ? "\033[1;31m" : "", color ? "\033[0m" : "", line);
}

}  // namespace

void install_notices() {
  set_log_sink([](std::string_view message) {
    static std::mutex mutex;
    static std::set<std::string, std::less<>> told;
    {
      const std::lock_guard lock(mutex);
      if (!told.emplace(message).second) return;
    }
    print_err("pagedkv: {}\n", message);
  });
}

int fail(const Status& status) {
  const std::string& message = status.message();
  print_error(message.starts_with('[') ? message : fmt::format("[{}] {}", code_name(status.code()), message));
  return 1;
}

int fail_usage(const std::string& message, const std::string& command) {
  print_error("[usage] " + message + "\n         " + command + " --help tells more");
  return 2;
}

bool is_terminal(std::FILE* stream) { return isatty(fileno(stream)) == 1; }

std::string table(const std::vector<std::vector<std::string>>& rows, const std::vector<Align>& align,
                  const std::string& indent) {
  std::vector<size_t> widths(align.size());
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string out;
  for (const auto& row : rows) {
    std::string line = indent;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      line += align[i] == Align::kRight ? padding + row[i] : row[i] + padding;
      if (i + 1 < row.size()) line += "  ";
    }
    line.resize(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::string with_commas(int64_t n) {
  const std::string digits = std::to_string(n);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (!out.empty() && out != "-" && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string human_bytes(int64_t n) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (n < 1024) return std::to_string(n) + " bytes";
  double value = double(n) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

ProgressBar::ProgressBar(std::string what) : what_(std::move(what)), enabled_(is_terminal(stderr)) {}

void ProgressBar::show(double fraction, const std::string& note) {
  const int percent = int(std::clamp(fraction, 0.0, 1.0) * 100);
  if (!enabled_ || (percent == shown_percent_ && note.empty())) return;
  shown_percent_ = percent;
  constexpr int kCells = 30;
  const int filled = percent * kCells / 100;
  const size_t wipe = shown_note_ > note.size() ? shown_note_ - note.size() : 0;
  print_err("\r{} [{:#<{}}{:.<{}}] {:3} %  {}{:{}}", what_, "", filled, "", kCells - filled, percent, note, "",
            wipe);
  shown_note_ = note.size();
}

void ProgressBar::clear() {
  if (shown_percent_ < 0) return;
  shown_percent_ = -1;
  print_err("\r{}\r", std::string(what_.size() + 42 + shown_note_, ' '));
}

}  // namespace pagedkv::cli
