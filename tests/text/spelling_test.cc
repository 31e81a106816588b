// What a vocabulary cannot spell, the space it puts in front, and grammars that it cannot follow: on tiny
// vocabularies with letters and no bytes, with few bytes, and with all of them.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "engine/answer.h"
#include "engine/text.h"

namespace pagedkv::engine {
namespace {

std::unique_ptr<Text> load(const std::string& name) {
  auto text = Text::load(std::string(PAGEDKV_TINY_MODELS) + "/" + name + ".gguf");
  EXPECT_TRUE(text.ok()) << text.status().message();
  return std::move(*text);
}
const char* const kVocabularies[] = {"d64_gqa3_tied", "spm_letters", "bpe_few_bytes"};

TEST(Spelling, ACharacterThatTheVocabularyLacksIsNamed) {
  const struct {
    const char *vocabulary, *text, *words;
  } cases[] = {
      {"spm_letters", "H\xC3\xA9", "U+00E9 (\xC3\xA9) at byte 1"},  // libllama throws
      {"spm_letters", "Hello!", "U+0021 (!) at byte 5"},
      {"spm_letters", "He\n", "U+000A at byte 2"},
      {"bpe_few_bytes", "ab{", "U+007B ({) at byte 2"},  // libllama leaves it out, and says nothing
      {"bpe_few_bytes",
       "a\x04"
       "b",
       "U+0004 at byte 1"},
      {"bpe_few_bytes", "a\xE4\xBD\xA0", "U+4F60"},
  };
  for (const auto& c : cases) {
    auto tokens = load(c.vocabulary)->tokenize(c.text, true, false);
    ASSERT_FALSE(tokens.ok()) << c.text;
    EXPECT_EQ(tokens.status().code(), Code::kInvalidArgument);
    EXPECT_NE(tokens.status().message().find(c.words), std::string::npos) << tokens.status().message();
  }
  EXPECT_TRUE(load("d64_gqa3_tied")->tokenize("H\xC3\xA9 {\x04\n", true, false).ok()) << "bytes spell anything";
}

TEST(Spelling, WhatIsTokenizedSpellsItselfAgain) {
  for (const char* name : kVocabularies) {
    auto text = load(name);
    for (const std::string plain : {"hello", " hello", "  two words", "abc a", "", " "}) {
      auto tokens = text->tokenize(plain, false, false);
      ASSERT_TRUE(tokens.ok()) << tokens.status().message();
      EXPECT_EQ(text->spell(*tokens), plain) << name;
      auto with_bos = text->tokenize(plain, true, false);
      EXPECT_EQ(text->spell(*with_bos), plain) << name;
    }
  }
}

// The logits of a model that wants just these tokens.
struct Script {
  std::vector<int32_t> tokens;
  size_t at = 0;
  std::vector<float> next(int64_t vocabulary) {
    std::vector<float> logits(static_cast<size_t>(vocabulary));
    if (at < tokens.size()) logits[size_t(tokens[at++])] = 10;
    return logits;
  }
};

std::string answer_of(const Text& text, const std::vector<int32_t>& prompt, const std::string& says,
                      bool own_text) {
  Script script{text.tokenize(says, false, false).value()};
  auto answer = Answer::begin(
      text, prompt, Tokens(100),
      {.max_tokens = Tokens(std::ssize(script.tokens)), .sampling = {.temperature = 0}, .own_text = own_text});
  std::string said;
  for (size_t i = 0; i < script.tokens.size(); ++i) said += (*answer)->grow(script.next(text.vocab_size()))->text;
  return said;
}

TEST(Spelling, AnAnswerThatIsATextOfItsOwnDoesNotBeginWithTheVocabulariesSpace) {
  auto text = load("spm_letters");
  ASSERT_TRUE(text->has_space_prefix());
  const std::vector<int32_t> prompt = text->tokenize("once upon", true, false).value();
  EXPECT_EQ(answer_of(*text, prompt, "a time", true), "a time");
  EXPECT_EQ(answer_of(*text, prompt, " a time", true), " a time") << "a space of the answer's own stays";
  EXPECT_EQ(answer_of(*text, prompt, "a time", false), " a time") << "it goes on where the prompt ends";
  EXPECT_EQ(answer_of(*text, {1}, "a time", false), "a time") << "after a control token a text begins";
  EXPECT_EQ(answer_of(*load("bpe_few_bytes"), prompt, " a", true), " a");
}

std::vector<float> flat(const Text& text) { return std::vector<float>(size_t(text.vocab_size())); }

// From issue to test: what libllama answered with an exception or an abort ends as a Status.
TEST(Sampling, AGrammarThatTheVocabularyCannotGoOnWithIsAnError) {
  for (const char* name : kVocabularies) {
    auto text = load(name);
    for (const float temperature : {0.0f, 1.0f}) {
      // The end token is pushed as far up as a request may, and must not be taken in the middle.
      auto sampler = text->make_sampler({.temperature = temperature,
                                         .logit_bias = {{2, 100.0f}},
                                         .grammar = "root ::= \"a\" [^\\x00-\\U0010FFFF]"});
      ASSERT_TRUE(sampler.ok()) << sampler.status().message();
      const auto first = (*sampler)->sample(flat(*text));
      ASSERT_TRUE(first.ok()) << name << ": " << first.status().message();
      EXPECT_EQ(text->piece(*first), "a");
      const auto second = (*sampler)->sample(flat(*text));
      ASSERT_FALSE(second.ok());
      EXPECT_EQ(second.status().code(), Code::kInvalidArgument);
      EXPECT_NE(second.status().message().find("no token of this model's vocabulary goes on after 1 token"),
                std::string::npos)
          << second.status().message();
      EXPECT_FALSE((*sampler)->sample(flat(*text)).ok()) << "and again";
    }
  }
  auto few = load("bpe_few_bytes");
  auto object = few->make_sampler({.grammar = "root ::= \"{\" [^}]* \"}\""});
  ASSERT_TRUE(object.ok());
  EXPECT_NE((*object)->sample(flat(*few)).status().message().find("after 0 tokens"), std::string::npos);
}

TEST(Sampling, AGrammarEndsWithTheEndTokenAndNowhereElse) {
  for (const char* name : kVocabularies) {
    auto text = load(name);
    auto sampler =
        text->make_sampler({.temperature = 1, .logit_bias = {{2, 100.0f}}, .grammar = "root ::= \"a\" \"b\""});
    ASSERT_TRUE(sampler.ok());
    std::string said;
    for (int i = 0; i < 4; ++i) {
      const auto token = (*sampler)->sample(flat(*text));
      ASSERT_TRUE(token.ok()) << token.status().message();
      if (text->is_end(*token)) break;
      said += text->piece(*token);
    }
    EXPECT_EQ(said, "ab") << name;
  }
}

TEST(Sampling, LogitsThatAreNoNumbersAreAnErrorNotASort) {
  auto text = load("spm_letters");
  for (const int top_k : {0, 40}) {
    auto logits = flat(*text);
    logits[7] = NAN;
    auto sampler = text->make_sampler({.temperature = 1, .top_k = top_k});
    EXPECT_EQ((*sampler)->sample(logits).status().code(), Code::kNotFinite);
    std::fill(logits.begin(), logits.end(), -INFINITY);
    EXPECT_EQ((*sampler)->sample(logits).status().code(), Code::kNotFinite);
    EXPECT_TRUE((*sampler)->sample(flat(*text)).ok());
  }
}

TEST(Sampling, MessagesKeepTheirNumbersInAForeignLocale) {
  struct Comma : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\1"; }
    char do_thousands_sep() const override { return '.'; }
  };
  const std::locale old = std::locale::global(std::locale(std::locale::classic(), new Comma));
  const std::string message = check_sampling({.temperature = 101.5f}).message();
  std::locale::global(old);
  EXPECT_EQ(message, "[sampling] temperature is 101.5, allowed are 0 to 100");
}

}  // namespace
}  // namespace pagedkv::engine
