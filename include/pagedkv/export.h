// What a shared build of the library offers; everything else stays inside.
#pragma once

#define PKV_API __attribute__((visibility("default")))
