"""The torch.distributed backend "nb": `import netbottleneck.torch`, then `init_process_group("nb")`.

Also "cpu:nb", and beside others for other devices: "cpu:nb,cuda:nccl". See docs/torch_distributed.md.
"""
