// Reads a JSON schema a line, and prints for each a line of JSON: {"answers": [N texts]} drawn from its grammar, or
// {"refused": field, "why": message}.     schema_answers N
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "server/json_grammar.h"
#include "tests/server/random_answer.h"

using namespace pagedkv;
using namespace pagedkv::server;

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 10;
  std::mt19937 random(1);
  for (std::string line; std::getline(std::cin, line);) {
    OrderedJson out = OrderedJson::object();
    const auto text = schema_grammar(OrderedJson::parse(line), "schema");
    if (!text.ok()) {
      out = {{"refused", text.error().param}, {"why", text.error().message}};
    } else if (const auto grammar = engine::Grammar::parse(*text); !grammar.ok()) {
      out = {{"broken", grammar.status().message()}, {"grammar", *text}};
    } else {
      out["answers"] = OrderedJson::array();
      for (int i = 0; i < n; ++i) {
        const auto answer = random_answer(*grammar, random, 20 + random() % 200, 2000);
        if (answer) out["answers"].push_back(*answer);
      }
    }
    std::puts(dump(out).c_str());
  }
}
