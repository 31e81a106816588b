// Grammars: what they derive, what is refused, and what no grammar may do.
#include "engine/grammar.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

namespace pagedkv::engine {
namespace {

std::shared_ptr<const Grammar> read(const std::string& gbnf) {
  auto grammar = Grammar::parse(gbnf);
  EXPECT_TRUE(grammar.ok()) << grammar.status().message();
  return grammar.ok() ? *grammar : nullptr;
}
bool derives(const std::string& gbnf, const std::string& text) {
  GrammarState state(read(gbnf));
  return (text.empty() || state.advance(text)) && state.complete();
}
bool begins(const std::string& gbnf, const std::string& text) { return GrammarState(read(gbnf)).advance(text); }
std::string refusal(const std::string& gbnf) {
  auto grammar = Grammar::parse(gbnf);
  EXPECT_FALSE(grammar.ok()) << gbnf;
  EXPECT_EQ(grammar.status().code(), Code::kInvalidArgument) << gbnf;
  return grammar.ok() ? "" : grammar.status().message();
}

TEST(Grammar, DerivesLiteralsClassesGroupsAndRepetitions) {
  EXPECT_TRUE(derives(R"(root ::= "yes" | "no")", "yes"));
  EXPECT_FALSE(derives(R"(root ::= "yes" | "no")", "ye"));
  EXPECT_TRUE(begins(R"(root ::= "yes" | "no")", "ye"));
  EXPECT_FALSE(begins(R"(root ::= "yes" | "no")", "yo"));
  const std::string list = "root ::= item (\",\" item)*  # a comment\nitem ::= [a-c]{2,3} | [^a-z]+ | .\n";
  for (const char* text : {"ab", "abc,ab", "z", "123", "ab,9,\xE4\xBD\xA0", "\n"})
    EXPECT_TRUE(derives(list, text)) << text;
  for (const char* text : {"", "abcd", "ab,", ",ab", "zz"}) EXPECT_FALSE(derives(list, text)) << text;
  EXPECT_TRUE(derives("root ::= \"\\x41\\u00e9\\U0001F600\\n\\\"\\\\\"", "A\xC3\xA9\xF0\x9F\x98\x80\n\"\\"));
  EXPECT_TRUE(derives("root ::= \"a\"{3}", "aaa"));
  EXPECT_FALSE(derives("root ::= \"a\"{3}", "aa"));
  EXPECT_TRUE(derives("root ::= \"ab\"{0,2} \"c\"?", ""));
  EXPECT_TRUE(derives("root ::= \"ab\"{0,2} \"c\"?", "ababc"));
  EXPECT_FALSE(begins("root ::= \"ab\"{0,2} \"c\"?", "ababa"));
  EXPECT_TRUE(derives("root ::=\n  \"a\" |\n  \"b\"\n\nother ::= \"c\"", "b"));
  EXPECT_TRUE(derives("root ::= \"a\"{2,}", "aaaaa"));
  EXPECT_FALSE(derives("root ::= \"a\"{2,}", "a"));
}

// libllama loops for ever on some of these, and refuses the others.
TEST(Grammar, DerivesLeftRecursionAndRulesThatDeriveNothing) {
  EXPECT_TRUE(derives("root ::= root \"x\" | \"y\"", "yxxx"));
  EXPECT_TRUE(derives("root ::= a root \"x\" | \"y\"\na ::= b\nb ::= \"z\" | ", "zyx"));
  EXPECT_TRUE(derives("root ::= a root \"x\" | \"y\"\na ::= b\nb ::= \"z\" | ", "yxx"));
  EXPECT_FALSE(begins("root ::= a root \"x\" | \"y\"\na ::= b\nb ::= \"z\" | ", "x"));
  EXPECT_TRUE(derives("root ::= a a a a\na ::= \"\" | \"b\" a", ""));
  EXPECT_TRUE(derives("root ::= a \"c\"\na ::= b b\nb ::= c?\nc ::= \"d\"", "ddc"));
  EXPECT_TRUE(derives("root ::= \"\"* \"a\"", "a"));
  EXPECT_TRUE(derives("root ::= (\"a\"*)* \"b\"", "aab"));
  EXPECT_TRUE(derives("root ::= expr\nexpr ::= expr [-+] expr | \"(\" expr \")\" | [0-9]+", "1+(2-3)-4+5"));
}

TEST(Grammar, CharactersMayBeCutAnywhereIntoTokens) {
  GrammarState state(read("root ::= [\\u00e0-\\u00ef] \"!\""));
  EXPECT_FALSE(state.fits("\xC4")) << "no character of the class begins so";
  EXPECT_TRUE(state.advance("\xC3"));
  EXPECT_FALSE(state.complete());
  EXPECT_FALSE(state.fits("\xB0"));
  EXPECT_FALSE(state.fits("!"));
  EXPECT_TRUE(state.fits("\xA9!"));
  EXPECT_TRUE(state.advance("\xA9"));
  EXPECT_TRUE(state.advance("!"));
  EXPECT_TRUE(state.complete());
  // What is no UTF-8 fits nowhere: overlong, a surrogate, past the last character, a lone byte.
  for (const char* bytes : {"\xC0\x80", "\xE0\x80", "\xED\xA0", "\xF4\x90", "\xF5", "\x80", "\xFF"})
    EXPECT_FALSE(begins("root ::= .*", bytes)) << bytes;
  EXPECT_TRUE(derives("root ::= .*", "\xF4\x8F\xBF\xBF\xED\x9F\xBF\xE0\xA0\x80"));
  EXPECT_FALSE(begins("root ::= [^\\u0000-\\U0010ffff]", "a"));
  EXPECT_FALSE(begins("root ::= \"a\" [^\\x00-\\U0010FFFF]", "a\xF0"));
}

TEST(Grammar, WhatCannotBeReadIsRefusedWithItsLine) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "no rule \"root\""},
      {"rule ::= \"a\"", "no rule \"root\""},
      {"root ::= a", "\"a\" is named, and not defined"},
      {"root = \"a\"", "::= is expected"},
      {"root ::= \"a", "line 1: a literal is not closed"},
      {"root ::= \"a\"\nroot ::= [a", "line 2: a character class is not closed"},
      {"root ::= []", "a character class is empty"},
      {"root ::= [z-a]", "ends before it begins"},
      {"root ::= (\"a\"", ") is expected"},
      {"root ::= \"a\")", "the end of the rule is expected"},
      {"root ::= *", "nothing stands before"},
      {"root ::= \"a\"{", "a number is expected"},
      {"root ::= \"a\"{2,1}", "m <= n"},
      {"root ::= \"a\"{99999999999999999999}", "the limit is 4096"},
      {"root ::= \"a\"{0,5000}", "the limit is 4096"},
      {"root ::= \"\\q\"", "unknown escape"},
      {"root ::= \"\\u00\"", "4 hexadecimal digits"},
      {"root ::= \"\\U00110000\"", "no character"},
      {"root ::= root", "derives no text"},
      {"root ::= \"a\" b\nb ::= \"c\" b", "derives no text"},
      {"root ::= <think>", "tokens in grammars"},
      {"root ::= \"\xFF", "not valid UTF-8 at byte 10"},
      {"root ::= \"\xF0\x9F", "not valid UTF-8"},
      {std::string("root ::= \"a\"\0", 13), "the end of the rule is expected"},
      {std::string(600, '(').insert(0, "root ::= "), "nested more than 500 deep"},
  };
  for (const auto& [gbnf, words] : cases)
    EXPECT_NE(refusal(gbnf).find(words), std::string::npos) << gbnf << "\n" << refusal(gbnf);
  // Repetitions of repetitions are written out, up to a limit.
  std::string nested = "root ::= \"a\"";
  for (int i = 0; i < 3; ++i) nested += "{4000}";
  GrammarState fine(read(nested));  // a rule of rules: 12,000 elements, not 64 billion
  EXPECT_TRUE(fine.advance(std::string(1000, 'a')));
  std::string wide = "root ::= ";
  for (int i = 0; i < 300; ++i) wide += "[a-z]{4000} ";
  EXPECT_NE(refusal(wide).find("more than 1048576 elements"), std::string::npos);
}

// Two ways at every step: kept apart, they would be 2^n.
TEST(Grammar, AmbiguityStaysPolynomial) {
  GrammarState twice(read("root ::= s\ns ::= \"[\" s \"b\" | \"[\" s \"c\" | \"[\" s \"b\" | \"d\""));
  EXPECT_TRUE(twice.advance(std::string(2000, '[') + "d" + std::string(1000, 'b') + std::string(999, 'c')));
  EXPECT_FALSE(twice.complete());
  EXPECT_TRUE(twice.advance("b"));
  EXPECT_TRUE(twice.complete());
  GrammarState sums(read("root ::= root \"+\" root | \"1\""));
  std::string sum = "1";
  for (int i = 0; i < 200; ++i) sum += "+1";
  EXPECT_TRUE(sums.advance(sum));
  EXPECT_TRUE(sums.complete());
  GrammarState right(read("root ::= \"a\" root | \"\""));  // flat, however long
  EXPECT_TRUE(right.advance(std::string(200000, 'a')));
  GrammarState left(read("root ::= root \"a\" | \"\""));
  EXPECT_TRUE(left.advance(std::string(200000, 'a')));
}

TEST(Grammar, AnAnswerThatCannotBeFollowedAnyMoreFitsNothingAndStaysWithinItsMemory) {
  GrammarState state(read("root ::= root root root | root root | \"a\" | \"\""));
  int64_t n = 0;
  while (n < 100000 && state.advance("a")) ++n;
  EXPECT_GT(n, 10);
  EXPECT_TRUE(n == 100000 || (state.exhausted() && !state.fits("a")));
}

// The walk over the sorted vocabulary finds just what a question for each token finds.
TEST(Grammar, TheTokensThatFitAreThoseThatFitOneByOne) {
  std::mt19937 random(7);
  std::vector<std::string> pieces = {"",     "a",        "b",    "ab", "abc", "\xC3", "\xC3\xA9",
                                     "\xA9", "\xF0\x9F", "\xFF", "{",  "\"",  "}"};
  for (int i = 0; i < 500; ++i) {
    std::string piece;
    for (int n = int(random() % 5) + 1; n > 0; --n) piece += "ab{}\":, 01\xC3\xA9\xE4\xBD\xA0"[random() % 16];
    pieces.push_back(piece);
  }
  const SortedPieces sorted(pieces);
  const char* grammars[] = {
      "root ::= .*",
      "root ::= [ab]* | \"{\" pair (\",\" pair)* \"}\"\npair ::= \"\\\"\" [^\"]* \"\\\"\" \":\" [0-9]+",
      "root ::= (\"ab\" | \"a\" | \"\\u00e9\")* \"\\\"\"",
      "root ::= [^a]{0,3} [^b]* ",
  };
  for (const char* gbnf : grammars) {
    GrammarState state(read(gbnf));
    for (int step = 0; step < 40; ++step) {
      std::set<int32_t> expected;
      for (size_t token = 0; token < pieces.size(); ++token)
        if (state.fits(pieces[token])) expected.insert(int32_t(token));
      const auto found = state.fitting(sorted);
      ASSERT_EQ(std::set<int32_t>(found.begin(), found.end()), expected) << gbnf << " at step " << step;
      ASSERT_EQ(found.size(), expected.size());
      if (found.empty()) break;
      ASSERT_TRUE(state.advance(pieces[size_t(found[random() % found.size()])]));
    }
  }
}

}  // namespace
}  // namespace pagedkv::engine
