// stderr: everything that is not the answer.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "pagedkv/status.h"

namespace pagedkv::cli {

// Sends the notices of library and engine to stderr as `pagedkv: ...`, each text once.
void install_notices();

// Prints `pagedkv: [what] message` and returns exit code 1.
int fail(const Status& status);
// The same for a command line that cannot be right; exit code 2.
int fail_usage(const std::string& message, const std::string& command);

bool is_terminal(std::FILE* stream);

// Aligned columns, two spaces between them, `indent` before. The first column is left-aligned, the others as told.
enum class Align { kLeft, kRight };
std::string table(const std::vector<std::vector<std::string>>& rows, const std::vector<Align>& align,
                  const std::string& indent = "");

std::string with_commas(int64_t n);  // 23,040
std::string human_bytes(int64_t n);  // 1.4 MiB

// A bar on stderr while something long runs; nothing where stderr is not a terminal. One thread.
class ProgressBar {
 public:
  explicit ProgressBar(std::string what);
  ~ProgressBar() { clear(); }
  void show(double fraction, const std::string& note = "");  // 0 .. 1; the note stands behind the bar
  void clear();

 private:
  std::string what_;
  bool enabled_;
  int shown_percent_ = -1;
  size_t shown_note_ = 0;  // its length, to be wiped
};

}  // namespace pagedkv::cli
