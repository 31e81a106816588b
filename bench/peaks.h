// What the cores of this machine multiply and add at most. One multiply-add counts as two operations, everywhere.
#pragma once

#include <string>

#include "bench/measure.h"

namespace pagedkv::bench {

struct Peak {
  double ops = 0;       // operations a second of the whole team; 0: no such path here
  std::string path;     // the instruction of the best path that this CPU has: "AVX-512 VNNI vpdpbusd"
  std::string missing;  // why there is none
};

// The best of many short samples, a quarter of a second in all: what slows a core down is never the code's doing.
Peak f32_peak(Team& team);   // multiply-adds of f32
Peak int8_peak(Team& team);  // dot products of 8-bit integers into 32 bits
Peak bf16_peak(Team& team);  // dot products of bf16 into f32

}  // namespace pagedkv::bench
