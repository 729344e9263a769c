// Checks of the tests: the first that fails ends the program and says where.
//
// Ownership: nothing is kept.
// Threads: any thread may call.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <string_view>

namespace zinf::tests {

inline void check(bool holds, std::string_view what, std::source_location at = std::source_location::current()) {
    if (holds) return;
    std::fprintf(stderr, "%s:%u: %.*s\n", at.file_name(), at.line(), static_cast<int>(what.size()), what.data());
    std::fflush(nullptr);
    std::_Exit(1);
}

template <typename Left, typename Right>
void check_equal(const Left& left, const Right& right, std::string_view what,
                 std::source_location at = std::source_location::current()) {
    if (!(left == right)) {
        std::fprintf(stderr, "%lld is not %lld: ", static_cast<long long>(left), static_cast<long long>(right));
    }
    check(left == right, what, at);
}

}  // namespace zinf::tests
