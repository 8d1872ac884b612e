#include "hyper_mpmd/version.h"

namespace hyper_mpmd {

const char* version() { return "0.1.0"; }

}  // namespace hyper_mpmd
