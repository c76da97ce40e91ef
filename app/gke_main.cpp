// gemtune-gke: `gemtune gke` without LibTorch, so that it starts at once.
#include "app/gke.h"
#include "base/error.h"
#include "base/log.h"

int main(int argc, char** argv) {
  try {
    return gemtune::run_gke(argc, argv);
  } catch (const gemtune::Error& error) {
    gemtune::log_line(gemtune::LogLevel::kError, error.what());
    return int(error.code());
  } catch (const std::exception& error) {
    gemtune::log_line(gemtune::LogLevel::kError, error.what());
    return int(gemtune::ExitCode::kJobFailed);
  }
}
