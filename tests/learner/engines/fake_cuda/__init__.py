"""The FSDP2 engine on CUDA devices that are none: FakeTensors, and process groups in which no rank answers."""
