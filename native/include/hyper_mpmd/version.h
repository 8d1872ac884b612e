#pragma once

namespace hyper_mpmd {

const char* version();

}  // namespace hyper_mpmd
