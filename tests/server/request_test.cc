// Bodies: random damage to good ones, and schemas as grammars that libllama reads.
#include <gtest/gtest.h>

#include <filesystem>
#include <random>

#include "server/completion_request.h"
#include "server/json_body.h"
#include "server/json_grammar.h"
#include "tests/server/scripted_model.h"

namespace pagedkv::server {
namespace {

RequestLimits limits() { return {.models = {"m"}, .context = Tokens(4096), .max_choices = 8}; }

const char* const kBodies[] = {
    R"({"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"h\u00e9"}]}],
        "temperature":0.5,"top_p":0.9,"top_k":40,"n":2,"stop":["a","b"],"max_tokens":12,"logit_bias":{"5":-10},
        "logprobs":true,"top_logprobs":3,"stream":true,"stream_options":{"include_usage":true},"seed":-5})",
    R"({"prompt":["one",[1,2,3]],"logprobs":2,"max_tokens":1e3,"presence_penalty":-1,"user":"u","cache_salt":"s"})",
    R"({"messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,"tool_calls":[{"function":
        {"name":"f","arguments":"{}"}}]},{"role":"tool","content":"r"}],"response_format":{"type":"json_schema",
        "json_schema":{"name":"n","schema":{"type":"object","properties":{"a":{"type":["string","null"],"maxLength":5},
        "b":{"$ref":"#/$defs/d"}},"required":["a"],"$defs":{"d":{"anyOf":[{"type":"integer"},{"const":"x"}]}}}}}})"};

TEST(Request, AHundredThousandDamagedBodiesAreReadOrRefused) {
  const engine::ScriptedText text;
  std::mt19937 random(3);
  const std::string pieces[] = {"{",
                                "}",
                                "[",
                                "]",
                                "\"",
                                ":",
                                ",",
                                "null",
                                "true",
                                "-1",
                                "1e99",
                                "1e9",
                                "\\u",
                                "\xff",
                                "\\ud8",
                                "0.5",
                                "9223372036854775808",
                                "[[[[[[",
                                "\"\"",
                                "{}",
                                "\"n\"",
                                "\"stop\"",
                                "\n",
                                "\x01"};
  int good = 0, refused = 0;
  for (int i = 0; i < 100000; ++i) {
    std::string body = kBodies[random() % std::size(kBodies)];
    for (auto edits = random() % 4 + 1; edits > 0; --edits) {
      const size_t at = random() % (body.size() + 1);
      switch (random() % 5) {
        case 0:
          body.insert(at, pieces[random() % std::size(pieces)]);
          break;
        case 1:
          body.erase(at, random() % 8);
          break;
        case 2:
          if (at < body.size()) body[at] = char(random());
          break;
        case 3:
          body.replace(std::min(at, body.size()), random() % 12, pieces[random() % std::size(pieces)]);
          break;
        default:
          body.resize(at);
          body += body.substr(0, random() % 20);
      }
    }
    for (const Endpoint endpoint : {Endpoint::kChat, Endpoint::kCompletions}) {
      const auto result = read_completion(endpoint, body, text, limits());
      if (!result.ok()) {
        ++refused;
        ASSERT_GE(result.error().status, 400) << body;
        ASSERT_LT(result.error().status, 500) << result.error().message << "\n" << body;
        ASSERT_TRUE(Json::accept(error_json(result.error()))) << body;
      } else {
        ++good;
        ASSERT_FALSE(result->prompts.empty());
      }
    }
  }
  EXPECT_GT(good, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(Request, ReadingEndsWhenTheClientLeaves) {
  const engine::ScriptedText text;
  std::string body = R"({"prompt":[1)";
  for (int i = 0; i < 100000; ++i) body += ",1";
  int asked = 0;
  const auto result =
      read_completion(Endpoint::kCompletions, body + "]}", text, limits(), [&] { return ++asked == 3; });
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().status, client_left().status);
  EXPECT_EQ(asked, 3);
}

TEST(Request, NamesKeepTheirOrderAndTheLastOfEqualNamesCounts) {
  const auto json = parse_ordered_object(R"({"b":1,"a":{"z":[],"y":{}},"b":[2,{"d":3,"c":null}]})");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ(dump(*json), R"({"b":[2,{"d":3,"c":null}],"a":{"z":[],"y":{}}})");
}

TEST(Request, TextsOfErrorsAreShortWhateverTheBodyIs) {
  for (const std::string& body : {"\"" + std::string(1 << 20, 'x'), "{\"a\":" + std::string(1 << 20, '7') + "x"}) {
    const auto json = parse_object(body);
    ASSERT_FALSE(json.ok());
    EXPECT_LT(json.error().message.size(), 400u);
  }
}

TEST(Request, TokenIdsOfABiasAreWrittenAsNumbersAre) {
  const engine::ScriptedText text;
  const auto read = [&](const std::string& id) {
    return read_completion(Endpoint::kCompletions, R"({"prompt":"x","logit_bias":{")" + id + R"(":1}})", text,
                           limits());
  };
  for (const char* id :
       {" 5", "+5", "05", "5 ", "5.0", "5e0", "", "-0", "-5", "0x5", "259", "99999999999999999999"}) {
    const auto result = read(id);
    ASSERT_FALSE(result.ok()) << "\"" << id << "\"";
    const ApiError& error = result.error();
    EXPECT_EQ(error.param, "logit_bias");
    EXPECT_NE(error.message.find("expected are token ids from 0 to 258"), std::string::npos) << error.message;
  }
  for (const char* id : {"5", "0", "258"}) EXPECT_TRUE(read(id).ok()) << id;
}

TEST(Request, SeedsKeepTheir64Bits) {
  const engine::ScriptedText text;
  const auto seed_of = [&](const char* seed) {
    const auto result = read_completion(Endpoint::kCompletions,
                                        std::string(R"({"prompt":"x","seed":)") + seed + "}", text, limits());
    return result->prompts.at(0).answer.sampling.seed;
  };
  EXPECT_EQ(seed_of("4294967295"), 4294967295u);
  EXPECT_EQ(seed_of("4294967296"), 4294967296u) << "and not 1, its halves folded";
  EXPECT_EQ(seed_of("-1"), UINT64_MAX);
  EXPECT_EQ(seed_of("18446744073709551614"), UINT64_MAX - 1);
  EXPECT_EQ(seed_of("9223372036854775808"), uint64_t{1} << 63);
  EXPECT_EQ(seed_of("1e3"), 1000u);
  for (const char* seed : {"18446744073709551616", "1e300", "1.5", "true", "\"1\"", "-9223372036854775809"}) {
    const auto result = read_completion(Endpoint::kCompletions,
                                        std::string(R"({"prompt":"x","seed":)") + seed + "}", text, limits());
    ASSERT_FALSE(result.ok()) << seed;
    EXPECT_EQ(result.error().param, "seed");
  }
  EXPECT_NE(seed_of("null"), seed_of("null")) << "without one, any";
}

std::string grammar_of(const char* schema) {
  auto grammar = schema_grammar(OrderedJson::parse(schema), "schema");
  return grammar.ok() ? *grammar : "refused: " + grammar.error().param + ": " + grammar.error().message;
}

TEST(JsonGrammar, WhatCannotBeObeyedIsNamed) {
  EXPECT_TRUE(grammar_of(R"({"type":"string","pattern":"(a)\\1"})").starts_with("refused: schema.pattern"));
  EXPECT_TRUE(grammar_of(R"({"type":"object","properties":{"a":{"type":"number","multipleOf":-2}}})")
                  .starts_with("refused: schema.properties.a.multipleOf"));
  EXPECT_TRUE(grammar_of(R"({"type":"array","items":{"type":"strin"}})").starts_with("refused: schema.items.type"));
  EXPECT_TRUE(grammar_of(R"({"$ref":"#/$defs/none"})").starts_with("refused: schema.$ref"));
  EXPECT_TRUE(grammar_of(R"({"type":"object","required":[1]})").starts_with("refused: schema.required"));
  EXPECT_TRUE(grammar_of(R"({"type":"string","maxLength":1000000})").starts_with("refused: schema.maxLength"));
}

TEST(JsonGrammar, LibllamaReadsEveryGrammar) {
  if (!std::filesystem::exists(PAGEDKV_SMOLLM2)) GTEST_SKIP() << "no model: tools/model smollm2";
  auto text = engine::Text::load(PAGEDKV_SMOLLM2);
  ASSERT_TRUE(text.ok());
  std::vector<std::string> grammars = {json_object_grammar()};
  for (const char* schema :
       {R"({})",
        R"(true)",
        R"({"type":"object"})",
        R"({"type":"array"})",
        R"({"type":"string"})",
        R"({"type":"integer"})",
        R"({"type":"number"})",
        R"({"type":"boolean"})",
        R"({"type":"null"})",
        R"({"type":"object","properties":{"a":{"type":"string"},"b":{"type":"integer"}},"required":["b"]})",
        R"({"type":"object","properties":{"a \"q\" \\ \n":{"type":"string"}},"required":["a \"q\" \\ \n"]})",
        R"({"type":"object","properties":{"a":{}},"additionalProperties":{"type":"number"}})",
        R"({"type":"object","additionalProperties":true})",
        R"({"type":"array","items":{"type":"number"},"minItems":2,"maxItems":4})",
        R"({"type":"array","prefixItems":[{"type":"number"},{"type":"string"}]})",
        R"({"type":"string","minLength":2,"maxLength":5})",
        R"({"type":"string","pattern":"^[\"\\\\\\u0001]*\u007f|\ud83d\ude00$"})",
        R"({"type":"string","format":"date-time"})",
        R"({"type":"number","minimum":-1.5,"multipleOf":0.25})",
        R"({"enum":["a",1,null,{"x":[1]}]})",
        R"({"const":"c"})",
        R"({"anyOf":[{"type":"string"},{"type":"null"}]})",
        R"({"type":["string","null"],"maxLength":3})",
        R"({"$ref":"#/$defs/tree","$defs":{"tree":{"type":"object","properties":{"kids":{"type":"array",
            "items":{"$ref":"#/$defs/tree"}}},"required":["kids"]}}})"}) {
    grammars.push_back(grammar_of(schema));
    EXPECT_FALSE(grammars.back().starts_with("refused")) << schema << "\n" << grammars.back();
  }
  for (const std::string& grammar : grammars) {
    engine::SamplingOptions sampling;
    sampling.grammar = grammar;
    EXPECT_TRUE((*text)->make_sampler(sampling).ok()) << grammar;
  }
}

}  // namespace
}  // namespace pagedkv::server
