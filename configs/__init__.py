"""Settings as yaml: a package, so that an installed megatron_rl finds them (pkg://megatron_rl.configs, a link to this folder)."""
