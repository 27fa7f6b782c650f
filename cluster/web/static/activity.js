// One thing at a time: what starts it, what stops it, and how it went.

import { showStatus } from "./dom.js";

/** Work that a form starts and a button stops; its status says how it went. */
export class Activity {
  #start;
  #stop;
  #status;
  #controller = null; // of the work under way
  #ended = null; // settles with that work

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

  /** Stop the work, if any is under way; the promise settles when it has ended. */
  stop() {
    this.#controller?.abort();
    return this.#ended;
  }

  say(text, kind) {
    showStatus(this.#status, text, kind);
  }

  /** Run `work(signal)`, which returns what to say of it in the end: [text, kind]. */
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
      controller.abort(); // what else the work began: where one of two lanes fails, the other runs for nobody
      this.#controller = null;
      this.#show();
    }
  }

  #show() {
    const [now, next] = this.isRunning ? [this.#start, this.#stop] : [this.#stop, this.#start];
    next.disabled = false;
    if (document.activeElement === now) next.focus(); // a disabled button would lose the keyboard's place
    now.disabled = true;
  }
}
