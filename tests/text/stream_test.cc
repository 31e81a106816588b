// What may be shown of a stream of token pieces, and which sampling options are in range.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/text.h"

namespace pagedkv::engine {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

struct Shown {
  std::vector<std::string> chunks;
  std::string text;
  bool stopped = false;
};

Shown show(const std::vector<std::string>& pieces, std::vector<std::string> stop = {}) {
  Shown shown;
  TextStream stream(std::move(stop));
  for (const std::string& piece : pieces) {
    if (stream.stopped()) break;
    shown.chunks.push_back(stream.push(piece));
  }
  shown.chunks.push_back(stream.finish());
  shown.stopped = stream.stopped();
  for (const std::string& chunk : shown.chunks) {
    EXPECT_EQ(find_invalid_utf8(chunk), -1) << "a chunk is valid UTF-8 on its own";
    shown.text += chunk;
  }
  return shown;
}

TEST(Utf8, ValidTextHasNoInvalidByte) {
  for (const char* text : {"", "abc", "\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xEF\xBF\xBD",
                           "\xF4\x8F\xBF\xBF", "\xED\x9F\xBF", "\xEE\x80\x80"})
    EXPECT_EQ(find_invalid_utf8(text), -1) << text;
}

TEST(Utf8, TheFirstInvalidByteIsNamed) {
  EXPECT_EQ(find_invalid_utf8("\xFF"), 0);
  EXPECT_EQ(find_invalid_utf8("ab\x80"), 2) << "continuation without a beginning";
  EXPECT_EQ(find_invalid_utf8("\xC0\xAF"), 0) << "overlong";
  EXPECT_EQ(find_invalid_utf8("\xE0\x80\x80"), 0) << "overlong";
  EXPECT_EQ(find_invalid_utf8("a\xED\xA0\x80"), 1) << "surrogate";
  EXPECT_EQ(find_invalid_utf8("\xF4\x90\x80\x80"), 0) << "past U+10FFFF";
  EXPECT_EQ(find_invalid_utf8("\xE2\x82"), 0) << "cut off";
  EXPECT_EQ(find_invalid_utf8("\xE2\x82\xAC\xE2\x41"), 3);
  EXPECT_EQ(find_invalid_utf8(std::string_view("\0a", 2)), -1) << "NUL is a character";
}

// O-API-13
TEST(TextStream, ACharacterSplitOverTokensArrivesWhole) {
  const std::string emoji = "\xF0\x9F\x98\x80";
  EXPECT_EQ(show({"\xF0\x9F", "\x98\x80"}).chunks, (std::vector<std::string>{"", emoji, ""}));
  EXPECT_EQ(show({"a\xF0", "\x9F\x98", "\x80z"}).text, "a" + emoji + "z");
  TextStream one, two;  // two streams at once
  EXPECT_EQ(one.push("\xF0\x9F"), "");
  EXPECT_EQ(two.push("\xF0"), "");
  EXPECT_EQ(one.push("\x98\x80"), emoji);
  EXPECT_EQ(two.push("\x9F\x98\x80"), emoji);
}

// O-API-14
TEST(TextStream, AStopStringOverPieceBordersLeaksNothing) {
  const std::vector<std::string> pieces = {"The quick br", "own", " fox", " jumps"};
  const Shown stopped = show(pieces, {"own fox"});
  EXPECT_EQ(stopped.text, "The quick br");
  EXPECT_TRUE(stopped.stopped);
  const Shown whole = show(pieces, {"own cat"});
  EXPECT_EQ(whole.text, "The quick brown fox jumps");
  EXPECT_FALSE(whole.stopped);
}

// O-API-15
TEST(TextStream, TextHeldBackForAStopStringIsNotLostAtTheEnd) {
  EXPECT_EQ(show({"ab", "X", "Y"}, {"XYZ"}).text, "abXY");
  EXPECT_EQ(show({"abXY"}, {"XYZ"}).chunks, (std::vector<std::string>{"ab", "XY"}));
}

TEST(TextStream, TheStopStringThatIsCompleteFirstWins) {
  EXPECT_EQ(show({"one two three"}, {"three", "two"}).text, "one ");
  EXPECT_EQ(show({"abcd"}, {"abcd", "bc"}).text, "a") << "as if the text had come byte by byte";
  EXPECT_EQ(show({"xxab"}, {"b", "ab"}).text, "xx") << "of those that end together, the longest";
}

TEST(TextStream, NothingComesAfterTheStopString) {
  TextStream stream({"END"});
  EXPECT_EQ(stream.push("a END b"), "a ");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.push("c"), "");
  EXPECT_EQ(stream.finish(), "");
}

TEST(TextStream, AnEmptyStopStringStopsNothing) { EXPECT_EQ(show({"abc"}, {""}).text, "abc"); }

TEST(TextStream, AStopStringOfSeveralByteCharactersIsHeldByItsBytes) {
  const std::string euro = "\xE2\x82\xAC";
  EXPECT_EQ(show({"1 \xE2", "\x82", "\xAC 2"}, {euro}).text, "1 ");
  EXPECT_EQ(show({"1 \xE2", "\x82", "\xAD 2"}, {euro}).text, "1 \xE2\x82\xAD 2");
}

TEST(TextStream, BytesThatAreNoTextBecomeReplacementCharacters) {
  EXPECT_EQ(show({"a\xFF", "b"}).text, std::string("a").append(kReplacement).append("b"));
  EXPECT_EQ(show({"a\xE2\x82"}).text, std::string("a").append(kReplacement)) << "incomplete at the end";
  EXPECT_EQ(show({"\xE2\x82", "STOP"}, {"STOP"}).text, kReplacement) << "incomplete before a stop string";
}

TEST(TextStream, TheTextDoesNotDependOnHowItWasCut) {
  const std::string text =
      "the \xE2\x82\xAC caf\xC3\xA9 \xF0\x9F\x98\x80 ba\xFF"
      "bab abab\xE2\x82 end";
  const std::vector<std::vector<std::string>> stops = {
      {}, {"bab a"}, {"abab\xE2\x82"}, {"end", "\xC3\xA9 "}, {"zzz", "babb"}, {"b", "abc"}};
  std::mt19937 random(7);
  for (const auto& stop : stops) {
    const std::string whole = show({text}, stop).text;
    for (int round = 0; round < 200; ++round) {
      std::vector<std::string> pieces;
      for (size_t at = 0; at < text.size();) {
        const size_t n = 1 + random() % 5;
        pieces.push_back(text.substr(at, n));
        at += n;
      }
      EXPECT_EQ(show(pieces, stop).text, whole);
    }
  }
}

// O-API-23
TEST(Sampling, ValuesOutOfRangeAreRefusedByName) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const auto message = [](SamplingOptions options) {
    const Status status = check_sampling(options);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  const auto with = [](auto SamplingOptions::*field, auto value) {
    SamplingOptions options;
    options.*field = value;
    return options;
  };
  EXPECT_EQ(message(with(&SamplingOptions::temperature, -1.0f)),
            "[sampling] temperature is -1, allowed are 0 to 100");
  for (const float bad : {nan, inf, -inf, -0.5f, 101.0f})
    EXPECT_NE(message(with(&SamplingOptions::temperature, bad)).find("temperature"), std::string::npos);
  for (const float bad : {nan, inf, -0.1f, 1.1f}) {
    EXPECT_NE(message(with(&SamplingOptions::top_p, bad)).find("top_p"), std::string::npos);
    EXPECT_NE(message(with(&SamplingOptions::min_p, bad)).find("min_p"), std::string::npos);
  }
  for (const float bad : {nan, inf, 0.0f, -1.0f, 11.0f})
    EXPECT_NE(message(with(&SamplingOptions::repeat_penalty, bad)).find("repeat_penalty"), std::string::npos);
  EXPECT_NE(message(with(&SamplingOptions::top_k, -5)).find("top_k is -5"), std::string::npos);
  EXPECT_NE(message(with(&SamplingOptions::repeat_last_n, -1)).find("repeat_last_n is -1"), std::string::npos);
}

TEST(Sampling, TheEdgesOfTheRangesAreAllowed) {
  EXPECT_TRUE(check_sampling({}).ok());
  EXPECT_TRUE(check_sampling({.temperature = 0,
                              .top_k = 0,
                              .top_p = 0,
                              .min_p = 0,
                              .repeat_penalty = 0.1f,
                              .repeat_last_n = 0,
                              .seed = 0})
                  .ok());
  EXPECT_TRUE(check_sampling({.temperature = 100,
                              .top_k = INT32_MAX,
                              .top_p = 1,
                              .min_p = 1,
                              .repeat_penalty = 10,
                              .repeat_last_n = 65536,
                              .seed = UINT32_MAX})
                  .ok());
}

}  // namespace
}  // namespace pagedkv::engine
