// `gemtune gke …`: its own command line, since it is also a program of its own (gemtune-gke) that links no Torch.
#pragma once

namespace gemtune {

// argv as the process got it: argv[1] is "gke". Returns the exit code or throws Error.
int run_gke(int argc, char** argv);

}  // namespace gemtune
