// 128-bit sums and products, for checking limits before anything is cut to 64 bits.
#pragma once

#include <string>

namespace hyper_mpmd::planner {

__extension__ typedef unsigned __int128 u128;

inline std::string decimal(u128 value) {
  std::string digits;
  do {
    digits.insert(digits.begin(), static_cast<char>('0' + static_cast<int>(value % 10)));
  } while (value /= 10);
  return digits;
}

}  // namespace hyper_mpmd::planner
