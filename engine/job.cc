#include "engine/job.h"

#include <utility>

namespace pagedkv::engine {

Result<std::unique_ptr<Job>> make_job(const Text& text, Tokens context, ServeRequest request,
                                      std::shared_ptr<RequestSink> sink) {
  auto answer = Answer::begin(text, request.prompt, context, request.answer);
  if (!answer.ok()) return answer.status();
  auto job = std::make_unique<Job>();
  job->open = request.n;
  job->usage.prompt_tokens = std::ssize(request.prompt);
  job->arrived = Clock::now();
  job->sink = std::move(sink);
  job->streams.push_back(std::make_unique<Stream>());
  job->streams[0]->job = job.get();
  job->streams[0]->answer = std::move(*answer);
  job->streams[0]->tokens = request.prompt;
  job->request = std::move(request);
  return job;
}

}  // namespace pagedkv::engine
