from specserve_workers.pod import main

main("decode")
