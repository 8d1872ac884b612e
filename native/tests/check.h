// The checks of the native tests: a failed one prints what and where, and the program goes on and ends with status 1.
//
//   int main() {
//     CHECK(1 + 1 == 2);
//     CHECK_EQ(answer(), 42);
//     return check::status();
//   }
#pragma once

#include <atomic>
#include <iostream>

namespace check {

inline std::atomic<int> failures{0};

inline int status() {
  if (failures > 0) std::cerr << failures << " check(s) failed\n";
  return failures > 0 ? 1 : 0;
}

inline bool failed(const char* file, int line, const char* what) {
  ++failures;
  std::cerr << file << ':' << line << ": " << what << '\n';
  return false;
}

}  // namespace check

#define CHECK(condition) ((condition) || check::failed(__FILE__, __LINE__, "CHECK(" #condition ") is false"))

#define CHECK_EQ(got, expected)                                                      \
  do {                                                                               \
    const auto& check_got = (got);                                                   \
    const auto& check_expected = (expected);                                         \
    if (!(check_got == check_expected)) {                                            \
      check::failed(__FILE__, __LINE__, "CHECK_EQ(" #got ", " #expected ")");        \
      std::cerr << "  got " << check_got << ", expected " << check_expected << '\n'; \
    }                                                                                \
  } while (false)

#define CHECK_THROWS(expression, Error)                                                         \
  do {                                                                                          \
    bool check_thrown = false;                                                                  \
    try {                                                                                       \
      (void)(expression);                                                                       \
    } catch (const Error&) {                                                                    \
      check_thrown = true;                                                                      \
    }                                                                                           \
    if (!check_thrown) check::failed(__FILE__, __LINE__, #expression " did not throw " #Error); \
  } while (false)
