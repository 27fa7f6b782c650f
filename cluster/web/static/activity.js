// One activity at a time, with its start form, stop button and status.

import { showStatus } from "./dom.js";

/** Work that a form starts and a button stops; a status shows its result. */
export class Activity {
  #start;
  #stop;
  #status;
  #controller = null; // of the running work
  #ended = null; // settles when that work has ended

  constructor(start, stop, status) {
    this.#start = start;
    this.#stop = stop;
    this.#status = status;
    stop.addEventListener("click", () => this.stop());
    this.#show();
  }

  get isRunning() {
    return this.#controller !== null;
  }

  /** Stop the running work, if any; the promise settles when it has ended. */
  stop() {
    this.#controller?.abort();
    return this.#ended;
  }

  say(text, kind) {
    showStatus(this.#status, text, kind);
  }

  /** Run `work(signal)`, which returns its final status: [text, kind]. */
  run(work) {
    this.#ended = this.#run(work);
  }

  async #run(work) {
    const controller = (this.#controller = new AbortController());
    this.#show();
    this.say("generating…", "good");
    try {
      this.say(...(await work(controller.signal)));
    } catch (error) {
      if (error.name === "AbortError") this.say("stopped", "warn");
      else this.say(error.message, "bad");
    } finally {
      controller.abort(); // stop the rest of the work: if one of two lanes fails, the other is useless
      this.#controller = null;
      this.#show();
    }
  }

  #show() {
    const [now, next] = this.isRunning ? [this.#start, this.#stop] : [this.#stop, this.#start];
    next.disabled = false;
    if (document.activeElement === now) next.focus(); // a disabled button would lose the focus
    now.disabled = true;
  }
}
