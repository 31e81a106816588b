#include "pagedkv/log.h"

#include <memory>
#include <mutex>

namespace pagedkv {
namespace {

std::mutex sink_mutex;
std::shared_ptr<const LogSink> current_sink;  // guarded by sink_mutex; null drops

}  // namespace

void set_log_sink(LogSink sink) {
  auto held = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  const std::lock_guard lock(sink_mutex);
  current_sink = std::move(held);
}

void notice(std::string_view message) {
  std::shared_ptr<const LogSink> sink;
  {
    const std::lock_guard lock(sink_mutex);
    sink = current_sink;
  }
  if (sink) (*sink)(message);  // outside the lock: a sink may replace itself
}

}  // namespace pagedkv
